"""Memory in large pages, and columns as rows."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

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
    x = torch.arange(float(pages.LEAST // 8) + 3)
    before = x.clone()
    assert in_large_pages(x) is x
    assert torch.equal(x, before)
    inside = in_large_pages(x[1:])  # not at the beginning of a page
    assert torch.equal(inside, before[1:])


def test_a_system_without_large_pages_is_left_alone(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert in_large_pages(torch.ones(pages.LEAST)).sum() == pages.LEAST


def test_a_tensor_without_memory_is_left_alone():
    with FakeTensorMode():
        x = torch.empty(pages.LEAST)
        assert in_large_pages(x) is x


def test_advice_that_is_not_heeded_is_no_error(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *_: -1)
    assert in_large_pages(torch.ones(pages.LEAST)).sum() == pages.LEAST
