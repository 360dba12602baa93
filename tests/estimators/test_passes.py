"""What a GPU is given: joined batches and recorded passes; on a CPU by the same way, with stand-ins for both."""

import pytest
import torch
import torch.nn.functional as F
from graphs import taped
from sample_truth import CE, Outside, Tokens, data, labels, mlp, randomised, seeded, true_traces
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from ritz import replay
from ritz.estimators import passes
from ritz.estimators.exact import exact_trace
from ritz.estimators.passes import joined
from ritz.estimators.samples import sample_traces
from ritz.estimators.squares import SquaredNorms
from ritz.losses import CrossEntropy
from ritz.operators import GGN, EmpiricalFisher, Fisher, Hessian
from ritz.plan import Plan
from ritz.risk import Risk

REPLAYED = Plan(replay=True)


def conv() -> nn.Sequential:
    return randomised(
        nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        )
    )  # fmt: skip


IMAGES, CLASSES = data(14, 1, 4, 4), labels(14)
PARTS = [(IMAGES[a : a + 4], CLASSES[a : a + 4]) for a in (0, 4, 8, 12)]  # the last one is ragged


@pytest.fixture
def graphs(monkeypatch):
    """What is recorded is played again as a GPU does it: no line of Python is run."""
    monkeypatch.setattr(replay, "_recorded", taped)


# ----------------------------------------------------------------------------------------------- recordings


@pytest.mark.usefixtures("graphs")
def test_recorded_sample_traces_are_the_eager_ones_while_weights_and_data_move():
    model = conv()
    risk = Risk(model, CE, PARTS, plan=REPLAYED)
    for step in range(3):
        here = [(x + step, y) for x, y in PARTS]
        found = sample_traces(risk.on(here)).value
        wanted = sample_traces(Risk(model, CE, here)).value
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, true_traces(model, CE, IMAGES + step, CLASSES), rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            model[1].running_mean += 0.1
    assert len(risk.shortcuts.recordings) == 1  # of the size that came more than once in a call


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("matrix", [Hessian, GGN, EmpiricalFisher])
def test_recorded_exact_traces_are_the_eager_ones(matrix):
    model = conv()
    risk, plain = (Risk(model, CE, PARTS, plan=Plan(replay=replays)) for replays in (True, False))
    for _ in range(3):
        assert exact_trace(matrix(risk))[1] == pytest.approx(exact_trace(matrix(plain))[1], rel=1e-12)
        with torch.no_grad():
            model[0].weight.mul_(1.1)
    assert len(risk.shortcuts.recordings) == 1


@pytest.mark.usefixtures("graphs")
def test_labels_that_are_drawn_belong_to_the_batch_and_are_not_recorded():
    risk, plain = (Risk(conv(), CE, PARTS, plan=Plan(replay=replays)) for replays in (True, False))
    for _ in range(3):
        assert exact_trace(Fisher(risk, num_samples=2)) == exact_trace(Fisher(plain, num_samples=2))
    assert len(risk.shortcuts.recordings) == 0


@pytest.mark.usefixtures("graphs")
def test_passes_without_layer_rules_are_not_recorded():
    X, y = data(9, 4), labels(9)
    risk = Risk(randomised(Outside()), CE, (X, y), batch_size=3, plan=REPLAYED)
    torch.testing.assert_close(sample_traces(risk).value, true_traces(risk.model, CE, X, y), rtol=1e-9, atol=1e-12)
    assert len(risk.shortcuts.recordings) == 0


@pytest.mark.usefixtures("graphs")
def test_masked_tokens_are_recorded_too():
    model, X, y = randomised(Tokens()), torch.randint(0, 5, (9, 5), generator=seeded(3)), labels(9, 5)
    y[0, 2:], y[7] = -100, -100
    found, wanted = (
        sample_traces(Risk(model, CrossEntropy(class_dim=-1), (X, y), batch_size=3, plan=plan), method="exact")
        for plan in (REPLAYED, Plan())
    )
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-12, atol=0)
    assert "1 samples have weight 0" in found.convention


class Looks(TorchDispatchMode):
    """Counts the numbers that the host reads from the device, and operations."""

    def __init__(self):
        super().__init__()
        self.looks, self.operations = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.looks += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def test_once_the_layers_are_known_the_host_looks_at_nothing(monkeypatch):
    """Else a pass cannot be recorded, and the device waits for the host."""
    monkeypatch.setattr(F, "one_hot", lambda x, n: torch.eye(n, dtype=torch.int64)[x])  # which looks on a CPU alone
    risk = Risk(conv(), CE, PARTS, plan=REPLAYED)
    squares, params = SquaredNorms(risk), risk.params()
    first, second, *_ = risk.batches
    with risk.session():
        for batch, known in ((first, False), (second, True)):
            with Looks() as seen:
                squares(params, batch, lambda out, batch=batch: risk.output_loss.roots(out, batch.data, 8))
            assert (seen.looks == 0) is known
            assert seen.operations > 20


# ---------------------------------------------------------------------------------------------- joined batches


@pytest.fixture
def roomy(monkeypatch):
    """A device that takes three of a CPU's pieces at once, which are whole batches here."""
    monkeypatch.setattr(passes, "room", lambda device: 3)


def sizes(risk: Risk) -> list[int]:
    return [batch.size for batch in risk.batches]


@pytest.mark.usefixtures("roomy")
def test_small_batches_are_joined_in_the_order_of_the_data(monkeypatch):
    risk = Risk(conv(), CE, PARTS)
    for piece, wanted in ((14, [14]), (4, [12, 2]), (3, [8, 6]), (2, [4, 4, 4, 2])):
        monkeypatch.setattr(passes, "fitting_piece", lambda *_, piece=piece: piece)
        assert sizes(joined(risk, 1)) == wanted


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("kind", ["tensors", "list", "loader"])
def test_joined_sample_traces_are_the_same(monkeypatch, kind):
    monkeypatch.setattr(passes, "fitting_piece", lambda *_: 3)
    kinds = {
        "tensors": ((IMAGES, CLASSES), 4),
        "list": (PARTS, None),
        "loader": (DataLoader(TensorDataset(IMAGES, CLASSES), batch_size=4), None),
    }
    given, size = kinds[kind]
    risk, seen = Risk(conv(), CE, given, batch_size=size), []
    found = sample_traces(risk, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 0), (2, 0)]
    torch.testing.assert_close(found.value, true_traces(risk.model, CE, IMAGES, CLASSES), rtol=1e-9, atol=1e-12)
    assert sizes(risk) == [4, 4, 4, 2]


class Cuts(TorchDispatchMode):
    """Counts the views that the host makes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.is_view
        return func(*args, **(kwargs or {}))


def test_the_views_of_a_call_hardly_grow_with_the_batch():
    """Each takes the host some microseconds: to cut 4,096 images into pairs took it longer than all kernels."""
    model, counts = mlp(4, 3), []
    for size in (64, 2048):
        risk = Risk(model, CE, (data(size, 4), labels(size)), batch_size=size)
        sample_traces(risk)
        with Cuts() as cuts:
            sample_traces(risk)
        counts.append(cuts.count)
    assert counts[1] < 2 * counts[0]


@pytest.mark.usefixtures("roomy")
def test_a_checkpoint_counts_the_batches_of_the_user(tmp_path):
    """A run may go on on a device that would join others."""
    risk, seen = Risk(conv(), CE, PARTS), []
    found = sample_traces(risk, checkpoint=tmp_path / "kept", progress=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3, 4]
    torch.testing.assert_close(found.value, sample_traces(risk).value, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("roomy")
def test_what_may_not_be_joined_or_does_not_stack_stays_as_it_is():
    X, y = data(6, 4), labels(6)
    parts = [(X[:3], y[:3]), (X[3:], y[3:])]
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    assert sizes(joined(Risk(model, CE, parts), 1)) == [6]
    for options in ({"dropout": True}, {"plan": Plan(micro_batch=2)}, {"plan": Plan(cache=False)}):
        risk = Risk(model, CE, parts, **options)
        assert joined(risk, 1) is risk
    long, short = (torch.zeros(2, steps, dtype=torch.long) for steps in (3, 5))
    risk = Risk(Tokens(), CrossEntropy(class_dim=-1), [(x, x) for x in (long, short)])
    assert joined(risk, 1) is risk
    one = Risk(mlp(4, 3), CE, parts[:1])
    assert joined(one, 1) is one


def test_data_that_fills_the_memory_is_not_copied(monkeypatch):
    risk = Risk(conv(), CE, PARTS)
    monkeypatch.setattr(passes, "room", lambda device: 1)
    assert joined(risk, 1) is not risk
    monkeypatch.setattr(torch.Tensor, "nbytes", 1 << 40)
    assert joined(risk, 1) is risk


# -------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_on_a_gpu_recorded_and_joined_sample_traces_are_those_of_a_cpu():
    model = conv()
    wanted = sample_traces(Risk(model, CE, (IMAGES, CLASSES)))
    risk = Risk(model.cuda(), CE, (IMAGES.cuda(), CLASSES.cuda()), batch_size=2)
    for _ in range(4):
        torch.testing.assert_close(sample_traces(risk).value, wanted.value, rtol=1e-9, atol=1e-12)
    apart = Risk(model, CE, [(x.cuda(), y.cuda()) for x, y in PARTS], plan=Plan(micro_batch=4))
    for _ in range(3):
        torch.testing.assert_close(sample_traces(apart).value, wanted.value, rtol=1e-9, atol=1e-12)
    assert len(apart.shortcuts.recordings) > 0
