"""One process by itself: every collective is the identity, and groups that are not there are refused."""

import copy
import pickle

import pytest
import torch

import ritz
from ritz import comm
from ritz.comm import SELF, World, world
from ritz.shares import turns
from ritz.space import ParamSpace, Shard

DATA = (torch.ones(4, 1), torch.zeros(4, 1))


def test_alone_every_collective_is_the_identity():
    x = torch.arange(3.0)
    assert SELF.sum(x) is x
    assert SELF.same(x, 1) == (x, [1])
    assert SELF.gather("a") == ["a"]
    assert SELF.first("a") == "a"
    assert SELF.any(True)
    assert not SELF.all(False)
    assert SELF.agree("work", None, 5) == [5]
    assert SELF.cat([x], x.device)[0][0] is not None


def test_alone_an_error_is_raised_as_it_is():
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        SELF.agree("work", error, None)
    assert caught.value is error


def test_without_a_process_group_a_risk_works_by_itself():
    risk = ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), DATA)
    assert risk.world is SELF
    assert ritz.Hessian(risk).world is SELF


def test_a_share_of_one_is_the_whole():
    model = torch.nn.Linear(1, 1)
    risk = ritz.Risk(model, torch.nn.MSELoss(), DATA, share=True)
    assert not risk.batches.share
    assert risk.loss() == ritz.Risk(model, torch.nn.MSELoss(), DATA).loss()
    with pytest.raises(ValueError, match="the data is empty"):
        ritz.Risk(model, torch.nn.MSELoss(), (torch.ones(0, 1), torch.ones(0, 1)), share=True)


@pytest.mark.parametrize("group", ["all", "World"])
def test_a_group_that_has_no_such_name_is_refused(group):
    with pytest.raises(ValueError, match=r"group must be 'world', 'self' or a process group"):
        ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), DATA, group=group)


@pytest.mark.parametrize("group", [None, 3])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match=r"group must be 'world', 'self' or a process group.*got (NoneType|int)"):
        ritz.Risk(torch.nn.Linear(1, 1), torch.nn.MSELoss(), DATA, group=group)


def test_a_copy_of_a_world_is_the_world_and_a_pickle_of_it_is_alone():
    assert copy.deepcopy(SELF) is SELF
    assert pickle.loads(pickle.dumps(SELF)).size == 1


def test_a_launcher_whose_ranks_do_not_know_each_other_is_noticed_once(monkeypatch, caplog):
    assert not comm.launched_apart()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert comm.launched_apart()
    comm._tell_once.cache_clear()
    for _ in range(2):
        assert world() is SELF
    assert [record.getMessage() for record in caplog.records] == [
        "a launcher started several ranks, and torch.distributed is not initialised: each does all of the work by "
        "itself; call torch.distributed.init_process_group() for them to share it"
    ]
    comm._tell_once.cache_clear()


def test_marks_of_tensors_differ_where_a_bit_does():
    x = torch.arange(6.0)
    assert comm._mark(x) == comm._mark(x.clone())
    assert comm._mark(x) != comm._mark(x.flip(0))
    assert comm._mark(x) != comm._mark(x + torch.tensor([0, 0, 0, 0, 0, 1e-15]))
    assert comm._mark(torch.ones(3, dtype=torch.bfloat16)) == comm._mark(torch.ones(3, dtype=torch.bfloat16))
    assert comm._mark(torch.ones(4, 2)[:1, 1]) == comm._mark(torch.ones(1))  # one element, of any stride


class Fake(World):
    """A rank of a world that is not there, for what needs no others."""

    def __init__(self, rank, size):
        self.rank, self.size, self.group, self.ranks = rank, size, None, list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("number", [1, 2, 5, 6])
def test_every_sample_falls_to_one_rank_and_all_have_as_many_rounds(size, cut, number):
    from ritz.batches import Batch

    data = [Batch((torch.arange(10 * b, 10 * b + 5 + b),), b, 0, 5 + b) for b in range(number)]
    rounds = [list(turns(data, Fake(rank, size), cut)) for rank in range(size)]
    assert len({len(own) for own in rounds}) == 1
    seen = [x for own in rounds for turn_list in own for turn in turn_list for x in turn.batch.data[0].tolist()]
    assert sorted(seen) == sorted(x for batch in data for x in batch.data[0].tolist())
    if not cut:
        assert all(turn.batch is data[turn.place] for own in rounds for turn_list in own for turn in turn_list)


@pytest.mark.parametrize("cut", [True, False])
def test_ranks_that_are_at_one_batch_at_a_time_have_all_of_it_and_the_first_piece_is_the_leaders(cut):
    from ritz.batches import Batch

    data = [Batch((torch.arange(10 * b, 10 * b + size),), b, 0, size) for b, size in enumerate((1, 5))]
    rounds = [list(turns(data, Fake(rank, 3), cut, in_step=True, apart=True, leader=2)) for rank in range(3)]
    for batch, of_ranks in zip(data, zip(*rounds, strict=True), strict=True):
        assert all([turn.place for turn in own] == [batch.index] for own in of_ranks)
        busy = {turn.piece: turn.batch for own in of_ranks for turn in own if not turn.batch.idle}
        assert torch.cat([busy[piece].data[0] for piece in sorted(busy)]).equal(batch.data[0])
        assert of_ranks[2][0].piece == 0
        assert not of_ranks[2][0].batch.idle


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_a_vector_cover_it_once(size):
    row = torch.arange(7.0)[None]
    shards = [Shard(Fake(rank, size), 7) for rank in range(size)]
    assert torch.equal(torch.cat([shard.part(row) for shard in shards], dim=-1), row)
    assert max(s.width for s in shards) - min(s.width for s in shards) <= 1


def test_sums_over_parameters_of_parts_add_up_to_those_of_the_whole():
    space = ParamSpace(("a", "b", "c"), (torch.Size([2]), torch.Size([1, 3]), torch.Size([4])))
    rows = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    parts = [space.segment(rows[:, first : first + 3], first) for first in (0, 3, 6)]
    torch.testing.assert_close(sum(parts), space.segment(rows))
