"""Memory in large pages, and columns as rows."""

import copy
import io

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ritz import memory
from ritz.operators import pages
from ritz.operators.pages import as_rows, in_large_pages


@pytest.mark.parametrize("shape", [(7, 3), (1, 4), (5, 1), (100, 8), (3, 0), (0, 3)])
@pytest.mark.parametrize("block", [1, 8, 1000])
def test_columns_become_rows_whatever_the_block(monkeypatch, shape, block):
    monkeypatch.setattr(pages, "_BLOCK", block)
    columns = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = as_rows(columns)
    assert rows.is_contiguous()
    assert torch.equal(rows, columns.T)


def test_columns_that_are_rows_seen_from_the_side_are_not_copied():
    rows = torch.ones(3, 5)
    assert as_rows(rows.T).data_ptr() == rows.data_ptr()


def test_columns_with_gaps_between_them_are_gathered():
    columns = torch.arange(24.0).reshape(4, 6)[:, ::2]
    assert torch.equal(as_rows(columns), columns.T)
    assert as_rows(columns).is_contiguous()


def test_a_gradient_goes_through_the_turn():
    columns = torch.ones(4, 2, requires_grad=True)
    (as_rows(columns) * torch.arange(4.0)).sum().backward()
    assert torch.equal(columns.grad, torch.arange(4.0)[:, None].expand(4, 2))


def test_advice_changes_no_element():
    x = torch.arange(float(pages.LEAST // 4) + 3)
    before = x.clone()
    assert in_large_pages(x) is x
    assert torch.equal(x, before)
    inside = in_large_pages(x[1:])  # not at the beginning of a page
    assert torch.equal(inside, before[1:])


def test_a_system_without_large_pages_is_left_alone(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert in_large_pages(torch.ones(pages.LEAST // 2)).sum() == pages.LEAST // 2


def test_a_tensor_without_memory_is_left_alone():
    with FakeTensorMode():
        x = torch.empty(pages.LEAST)
        assert in_large_pages(x) is x


def test_advice_that_is_not_heeded_is_no_error(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *_: -1)
    assert in_large_pages(torch.ones(pages.LEAST // 2)).sum() == pages.LEAST // 2


# ------------------------------------------------------------------------------------- blocks that wait for the next


SIZE = pages.KEPT.start // 8  # numbers of float64, as tests are


@pytest.fixture(autouse=True)
def none_idle():
    memory.idle.clear()
    yield
    memory.idle.clear()


def test_a_block_that_was_let_go_of_is_used_again():
    x = in_large_pages(torch.empty(2, SIZE))
    place = x.data_ptr()
    part = x[1, 5:]
    del x
    assert not memory.idle  # a view has its memory still
    del part
    assert len(memory.idle) == 1
    assert in_large_pages(torch.empty(4 * SIZE, dtype=torch.float32)).data_ptr() == place


def test_blocks_in_use_are_apart():
    found = [in_large_pages(torch.empty(SIZE)) for _ in range(4)]
    for number, x in enumerate(found):
        x.fill_(number)
    assert [x.unique().item() for x in found] == [0, 1, 2, 3]
    del found, x
    assert len(memory.idle) == 2  # no more are kept


def test_one_of_another_size_goes_back_to_the_system():
    in_large_pages(torch.empty(SIZE))
    x = in_large_pages(torch.empty(SIZE + 1))
    assert not memory.idle
    assert x.shape == (SIZE + 1,)


@pytest.mark.parametrize("size", [pages.KEPT.start - 8, pages.KEPT.stop + 7])
def test_small_and_very_large_ones_do_not_wait(size):
    x = torch.empty(size // 8)
    assert in_large_pages(x) is x


def test_where_each_operation_is_followed_a_tensor_is_as_torch_made_it():
    with FlopCounterMode(display=False):
        x = torch.empty(SIZE)
        assert in_large_pages(x) is x


def test_making_room_gives_idle_blocks_back():
    in_large_pages(torch.empty(SIZE))
    assert memory.idle
    memory.make_room(torch.device("cpu"))
    assert not memory.idle


def test_a_tensor_in_a_block_is_copied_and_saved_as_any_other():
    x = in_large_pages(torch.empty(SIZE)).fill_(2.0)
    assert copy.deepcopy(x).sum() == 2 * SIZE
    file = io.BytesIO()
    torch.save(x[:3].clone(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).tolist() == [2.0, 2.0, 2.0]
    y = x.clone().requires_grad_()
    (y * x).sum().backward()
    assert y.grad.sum() == 2 * SIZE
