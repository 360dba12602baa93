"""Recordings give what the function gives; keys, places and failures are the same on a CPU, which records nothing."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from graphs import taped
from torch import nn

from ritz import replay
from ritz.replay import Recordings


def doubled(calls: list):
    def fn(x: torch.Tensor):
        calls.append(x)
        return (2 * x,)

    return fn


def test_a_function_is_recorded_when_it_comes_for_the_second_time():
    recordings = Recordings()
    for number, kept in enumerate((0, 1, 1)):
        (y,) = recordings.run("twice", doubled([]), [torch.tensor([float(number)])])
        assert y.item() == 2 * number
        assert len(recordings) == kept


def test_results_belong_to_the_caller_and_inputs_stay_as_they_are():
    recordings, x = Recordings(), torch.ones(2)
    found = [recordings.run("twice", lambda x: (x.mul_(2),), [x.clone()])[0] for _ in range(4)]
    found[-1].zero_()
    assert [y.tolist() for y in found[:-1]] == [[2.0, 2.0]] * 3
    recordings.run("twice", lambda x: (x.mul_(2),), [x])
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float32)], ids=["shape", "precision"])
def test_other_inputs_are_another_recording(other):
    recordings = Recordings()
    for x in (torch.ones(2), torch.ones(2), other, other):
        assert recordings.run("twice", doubled([]), [x])[0].shape == x.shape
    assert len(recordings) == 2


def test_only_the_recordings_used_last_are_kept_and_the_others_are_freed():
    recordings, gone = Recordings(most=2), []
    for name in "abcd":
        fn = doubled([])
        gone.append(weakref.ref(fn))
        for _ in range(2):
            recordings.run(name, fn, [torch.ones(1)])
        del fn
    gc.collect()
    assert len(recordings) == 2
    assert [ref() is None for ref in gone] == [True, True, False, False]


def test_with_more_kinds_of_calls_than_recordings_each_is_recorded_once_at_most(monkeypatch):
    made, plain = [], replay._recorded
    monkeypatch.setattr(replay, "_recorded", lambda fn, own: made.append(own) or plain(fn, own))
    recordings = Recordings(most=2)
    for number in range(30):
        length = 1 + number % 3
        (y,) = recordings.run("twice", doubled([]), [torch.full((length,), float(number))])
        assert y.tolist() == [2.0 * number] * length
    assert (len(made), len(recordings)) == (3, 2)


def test_keys_that_never_come_back_do_not_pile_up():
    recordings = Recordings(most=2)
    for number in range(100):
        recordings.run(number, doubled([]), [torch.ones(1)])
    assert len(recordings._kept) <= 8


def test_a_function_that_cannot_be_recorded_is_run_as_it_is(monkeypatch):
    def refuse(fn, own):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "_recorded", refuse)
    recordings, calls = Recordings(), []
    for number in range(4):
        assert recordings.run("twice", doubled(calls), [torch.tensor([float(number)])])[0].item() == 2 * number
    assert len(calls) == 4
    assert len(recordings) == 0


def test_what_is_let_go_of_is_freed_and_not_recorded_again():
    recordings, fn = Recordings(), doubled([])
    for _ in range(2):
        recordings.run("twice", fn, [torch.ones(1)])
    gone = weakref.ref(fn)
    assert recordings.let_go()
    del fn
    gc.collect()
    assert gone() is None
    for _ in range(3):
        assert recordings.run("twice", doubled([]), [torch.ones(1)])[0].item() == 2
    assert len(recordings) == 0


def test_a_copy_starts_without_recordings():
    recordings = Recordings(most=3)
    for _ in range(2):
        recordings.run("twice", doubled([]), [torch.ones(1)])
    twin = copy.deepcopy(recordings)
    assert (len(twin), twin.most) == (0, 3)


def test_a_recording_does_not_take_over_the_graph_of_an_input():
    recordings, w = Recordings(), torch.ones(2, requires_grad=True)
    for _ in range(3):
        (y,) = recordings.run("twice", doubled([]), [2 * w])
    assert not y.requires_grad


def draws(device: str, record: bool) -> list[torch.Tensor]:
    """Five calls of a function that draws, the second of which makes the recording."""
    recordings, generator = Recordings(), torch.cuda if device == "cuda" else torch
    before = generator.get_rng_state()
    generator.manual_seed(0)
    ones = torch.ones(64, device=device)
    found = []
    for number in range(5):
        key = "one" if record else number
        found.append(recordings.run(key, lambda x: (nn.functional.dropout(x, 0.5),), [ones])[0])
    assert len(recordings) == record
    generator.set_rng_state(before)
    return found


def test_a_function_that_draws_draws_the_same_when_it_is_recorded(monkeypatch):
    monkeypatch.setattr(replay, "_recorded", taped)
    assert torch.equal(torch.stack(draws("cpu", record=True)), torch.stack(draws("cpu", record=False)))


@pytest.mark.gpu
def test_on_a_gpu_a_function_that_draws_draws_the_same_when_it_is_recorded():
    assert torch.equal(torch.stack(draws("cuda", record=True)), torch.stack(draws("cuda", record=False)))


@pytest.mark.gpu
def test_on_a_gpu_a_graph_is_replayed_and_reads_weights_where_they_lie():
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)).cuda()

    def fn(x):
        with torch.enable_grad():
            return torch.autograd.grad(layer(x).sum(), tuple(layer.parameters()))

    recordings = Recordings()
    for number in range(5):
        x = torch.full((3, 4), float(number), device="cuda")
        found, known = recordings.run("gradient", fn, [x]), fn(x)
        torch.testing.assert_close(found, known)
        with torch.no_grad():
            layer[0].weight.mul_(1.5)
    assert len(recordings) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_look_from_the_host_is_not_recorded_and_does_no_harm():
    recordings = Recordings()
    for number in range(4):
        x = torch.tensor([float(number)], device="cuda")
        (y,) = recordings.run("look", lambda x: (x * float(x),), [x])
        assert y.item() == number**2
    assert len(recordings) == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(2, device="cuda").isfinite().all()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(1 << 28, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before  # memory is given back still


@pytest.mark.parametrize("told", [True, False])
def test_the_memory_of_a_recording_that_failed_is_released_unless_torch_does_it(monkeypatch, told):
    """Twice would be once too often: torch counts who holds a pool."""
    calls = []

    def end(device: int, pool: tuple[int, int]) -> None:
        calls.append("end")
        if told:
            raise RuntimeError("not currently recording to that pool")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: calls.append("release"), raising=False)
    replay._give_up(torch.device("cuda", 1), (0, 7))
    assert calls == (["end"] if told else ["end", "release"])


@pytest.mark.parametrize(("free", "held", "room"), [(13, 0, True), (11, 0, False), (23, 10, True), (23, 12, False)])
def test_there_is_room_where_half_of_what_the_process_may_take_is_free(monkeypatch, free, held, room):
    monkeypatch.setattr(replay, "whole_memory", lambda device: 24.0)  # its share, of a larger device
    monkeypatch.setattr(replay, "free_memory", lambda device: float(free))
    assert replay._has_room(torch.device("cuda"), held) is room


@pytest.mark.parametrize(("sizes", "kept"), [((5, 6), 2), ((5, 8), 1), ((13, 5), 1)])
def test_what_recordings_hold_is_counted_and_one_that_leaves_too_little_is_not_kept(monkeypatch, sizes, kept):
    """24 bytes of memory in all: twelve must stay free."""
    plain, left = replay._recorded, iter(sizes)
    monkeypatch.setattr(replay, "_has_room", lambda device, held: 24 - held >= 12)
    monkeypatch.setattr(replay, "_recorded", lambda fn, own: replace(plain(fn, own), size=next(left)))
    recordings = Recordings()
    for key in "aabbab":
        assert recordings.run(key, doubled([]), [torch.ones(1)])[0].item() == 2.0
    assert (len(recordings), recordings.size) == (kept, sum(sizes) if kept == 2 else 5)


@pytest.mark.gpu
def test_on_a_gpu_a_recording_holds_the_memory_of_its_function_until_it_is_let_go_of():
    recordings, x = Recordings(), torch.ones(1 << 20, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):  # one intermediate result of 256 MiB
        (y,) = recordings.run("wide", lambda x: (x.expand(64, -1).clone().sum(0),), [x])
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    assert y[0].item() == 64
    assert 1 << 28 <= recordings.size <= held
    recordings.let_go()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 1 << 26
