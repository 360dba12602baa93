"""Every column of `outputs` against sums with hundreds of digits, where the softmax is flat and where it saturates."""

import math
from decimal import Decimal, localcontext

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ritz
from ritz.errors import NonFiniteError, UnsupportedError
from ritz.measures.outputs import Outputs, sample_outputs

CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
COLUMNS = ("margin", "softmax_margin", "impurity", "slack", "confidence", "entropy", "slope", "loss")


def truth(logits: list[float], label: int) -> dict[str, float]:
    """Every column for one item, by its definition, with three hundred digits."""
    with localcontext() as context:
        context.prec = 300
        f = [Decimal(x) for x in logits]
        weights = [(x - max(f)).exp() for x in f]
        S = [w / sum(weights) for w in weights]
        others = [j for j in range(len(f)) if j != label]
        gamma = S[label] - max(S[j] for j in others)
        found = {
            "margin": f[label] - max(f[j] for j in others),
            "softmax_margin": gamma,
            "impurity": 1 - sum(s * s for s in S),
            "slack": 1 - gamma * gamma,
            "confidence": max(S),
            "entropy": -sum(s * s.ln() for s in S),
            "slope": sum(s * x for s, x in zip(S, f, strict=True)) - f[label],
            "loss": -S[label].ln(),
        }
        return {name: float(value) for name, value in found.items()}


class Table(nn.Module):
    """Gives its rows as outputs: any logits one likes."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(logits)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows[index[:, 0].long()]


def table_risk(logits, labels, dtype=torch.float64, **keywords) -> ritz.Risk:
    logits = torch.tensor(logits, dtype=dtype)
    index = torch.arange(len(logits), dtype=dtype)[:, None]
    return ritz.Risk(Table(logits), CE(), (index, torch.tensor(labels)), **keywords)


# ------------------------------------------------------------------------------------------------ columns


LOGITS = [
    [40.0, 0.0, 0.0],
    [0.0, 40.0, 1.0],
    [0.0, 0.0, 0.0],
    [1.5, -0.25, 3.0],
    [300.0, -200.0, 5.0],
    [2.0, 2.0, -9.0],
]


@pytest.mark.parametrize("label", range(3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_column_keeps_its_digits_where_the_softmax_saturates(label, dtype):
    found = sample_outputs(table_risk(LOGITS, [label] * len(LOGITS), dtype))
    for i, logits in enumerate(LOGITS):
        expected = truth(logits, label)
        for name in COLUMNS[:-1]:
            assert float(found.need(name)[i]) == pytest.approx(expected[name], rel=1e-13, abs=0), (name, logits)
        assert float(found.loss[i]) == pytest.approx(expected["loss"], abs=1e-13)


@given(
    logits=st.lists(st.floats(-60, 60).map(lambda x: round(x, 3)), min_size=2, max_size=6),
    label=st.integers(0, 5),
)
def test_columns_are_right_for_any_logits(logits, label):
    label %= len(logits)
    found, expected = sample_outputs(table_risk([logits], [label])), truth(logits, label)
    for name in ("impurity", "slack", "confidence", "entropy"):
        assert float(found.need(name)) == pytest.approx(expected[name], rel=1e-12, abs=0), name
    for name in ("margin", "softmax_margin", "slope"):  # these go through 0
        assert float(found.need(name)) == pytest.approx(expected[name], rel=1e-12, abs=1e-13), name


def test_plain_subtraction_would_have_lost_all_digits():  # else the tests above could not fail
    S = torch.tensor([40.0, 0.0, 0.0]).softmax(0)
    assert float(1 - S.square().sum()) == 0.0
    assert truth([40.0, 0.0, 0.0], 0)["impurity"] > 1e-17


@pytest.mark.parametrize("name", ["mlp_relu", "conv", "residual", "attention", "mlp_weighted"])
def test_columns_come_in_data_order_with_the_weights_of_the_loss(name):
    problem = cases.problem(name)
    found = sample_outputs(problem.risk())
    with torch.no_grad():
        logits = torch.cat([problem.model.eval()(x) for x, _ in problem.batches])
    x, y = problem.data
    for i in range(len(y)):
        expected = truth(logits[i].tolist(), int(y[i]))
        assert float(found.margin[i]) == pytest.approx(expected["margin"], rel=1e-9)
        assert float(found.impurity[i]) == pytest.approx(expected["impurity"], rel=1e-9)
    torch.testing.assert_close(found.input_norm2, x.flatten(1).square().sum(1))
    assert found.correct.tolist() == (logits.argmax(1) == y).tolist()
    weight = problem.loss.weight
    assert found.weight.tolist() == (torch.ones(len(y)) if weight is None else weight[y]).tolist()
    assert found.mean(found.loss) == pytest.approx(float(problem.loss(logits, y)), rel=1e-12)


@pytest.mark.parametrize("sizes", list(cases.partitions(11)))
def test_the_split_into_batches_makes_no_difference(sizes):
    problem = cases.problem("mlp_relu")
    whole, cut = (
        sample_outputs(problem.risk(problem.data)),
        sample_outputs(problem.risk(cases.split(*problem.data, sizes))),
    )
    torch.testing.assert_close(cut.slack, whole.slack, rtol=1e-12, atol=0)
    torch.testing.assert_close(cut.input_norm2, whole.input_norm2)


def test_ignored_items_are_left_out():
    problem = cases.problem("pixels")
    found = sample_outputs(problem.risk())
    y = problem.data[1].flatten()
    assert len(found.margin) == int((y != -1).sum())
    assert found.weight.tolist() == problem.loss.weight[y[y != -1]].tolist()
    assert found.input_norm2 is None  # an image has many pixels


def test_several_inputs_have_one_norm():
    class Pair(nn.Linear):
        def forward(self, a, b):
            return super().forward(torch.cat([a, b], dim=1))

    a, b = torch.ones(2, 2), torch.full((2, 1), 3.0)
    found = sample_outputs(ritz.Risk(Pair(3, 2), CE(), (a, b, torch.tensor([0, 1]))))
    assert found.input_norm2.tolist() == [11.0, 11.0]


def test_the_norm_is_that_of_what_the_model_is_given():
    x, y = torch.full((2, 3), 255.0), torch.tensor([0, 1])
    pixels = ritz.Risk(nn.Linear(3, 2), CE(), (x, y), forward=lambda model, batch: model(batch[0] / 255))
    assert sample_outputs(pixels).input_norm2.tolist() == [3.0, 3.0]
    named = ritz.Risk(nn.Linear(3, 2), CE(), [{"x": x, "labels": y}], forward=lambda model, batch: model(batch["x"]))
    assert sample_outputs(named).input_norm2.tolist() == [3 * 255.0**2] * 2
    inside = ritz.Risk(nn.Sequential(nn.Linear(3, 2)), CE(), (x, y), forward=lambda model, batch: model[0](batch[0]))
    with pytest.raises(UnsupportedError, match="given in one call of the model"):
        sample_outputs(inside).need("input_norm2")


def test_an_input_that_is_not_laid_out_by_samples_has_no_norm():
    class Shared(nn.Linear):
        def forward(self, x, basis):
            return super().forward(x * basis[:3])

    batch = (torch.ones(2, 3), torch.ones(4), torch.tensor([0, 1]))
    assert sample_outputs(ritz.Risk(Shared(3, 2), CE(), [batch])).input_norm2 is None


def test_a_shuffling_loader_gives_unordered_columns():
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    assert not sample_outputs(ritz.Risk(nn.Linear(3, 2), CE(), loader)).ordered
    assert sample_outputs(ritz.Risk(nn.Linear(3, 2), CE(), list(loader))).ordered


def test_progress_is_told_of_every_batch():
    seen = []
    sample_outputs(cases.problem("mlp_relu").risk(), progress=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3]


# ------------------------------------------------------------------------------------------ binary, ties


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["flat", "column"])
def test_one_output_under_binary_cross_entropy_is_two_classes(shape):
    class Same(nn.Linear):
        def forward(self, x):
            return (x * self.weight).reshape(shape)

    model = Same(1, 1)
    nn.init.ones_(model.weight)
    logits, labels = [40.0, -1.0, 0.5, -30.0], [1, 1, 0, 0]
    y = torch.tensor(labels).double().reshape(shape)
    found = sample_outputs(ritz.Risk(model, BCE(), (torch.tensor(logits)[:, None], y)))
    assert (found.classes, found.one_logit, found.per_output) == (2, True, 0.5)
    for i, (f, label) in enumerate(zip(logits, labels, strict=True)):
        expected = truth([0.0, f], label)
        for name in COLUMNS:  # the loss included: softplus keeps its digits
            assert float(getattr(found, name)[i]) == pytest.approx(expected[name], rel=1e-13, abs=0), name


def test_two_outputs_are_not_one_logit():
    found = sample_outputs(table_risk([[1.0, 0.0]], [0]))
    assert (found.classes, found.one_logit, found.per_output) == (2, False, 1.0)


def test_a_tie_is_not_correct_and_has_margin_zero():
    found = sample_outputs(table_risk([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], [0, 1]))
    assert found.margin.tolist() == [0.0, 0.0]
    assert found.correct.tolist() == [False, False]
    torch.testing.assert_close(found.slack, torch.ones(2), rtol=1e-15, atol=0)


# --------------------------------------------------------------------------------------------- bad input


def test_a_class_ruled_out_by_an_infinite_logit_leaves_every_number_finite():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(1, torch.tensor([2]), -math.inf)

    model = Masked(2, 3)
    risk = ritz.Risk(model, CE(), (torch.ones(1, 2), torch.tensor([0])))
    found, f = sample_outputs(risk), model(torch.ones(1, 2))[0].tolist()
    expected = truth(f[:2], 0)
    for name in COLUMNS:
        assert float(found.need(name)) == pytest.approx(expected[name], rel=1e-12), name


def test_infinite_outputs_are_refused():
    class Blown(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.tensor([math.inf, 0.0])

    with pytest.raises(NonFiniteError, match="the loss of batch 0"):
        sample_outputs(ritz.Risk(Blown(2, 2), CE(), (torch.ones(1, 2), torch.tensor([0]))))


def test_labels_that_are_no_class_are_refused():
    with pytest.raises(ValueError, match="label 3 is not one of the 3 classes"):
        sample_outputs(table_risk([[1.0, 0.0, 0.0]], [3]))


def test_one_class_has_no_margin():
    found = sample_outputs(table_risk([[1.0], [2.0]], [0, 0]))
    assert found.loss.tolist() == [0.0, 0.0]
    with pytest.raises(UnsupportedError, match="at least two classes, this network has one"):
        found.need("margin")


@pytest.mark.parametrize("name", ["mlp_mse", "mlp_custom", "mlp_bce", "mlp_soft"])
def test_a_loss_without_labels_has_no_margins(name):
    found = sample_outputs(cases.problem(name).risk())
    assert found.margin is None
    with pytest.raises(UnsupportedError, match="needs classes and labels"):
        found.need("margin")


def test_tokens_have_margins_and_no_input_norm():
    found = sample_outputs(cases.problem("language").risk())
    assert len(found.margin) == int((cases.problem("language").data[1] != -100).sum())
    with pytest.raises(UnsupportedError, match="inputs that are floating tensors, one item each"):
        found.need("input_norm2")


def test_batch_statistics_leave_no_item_a_margin_of_its_own():
    found = sample_outputs(cases.problem("residual_train").risk())
    assert found.coupled
    assert len(found.need("margin")) == 11
    with pytest.raises(UnsupportedError, match=r"BatchNorm in train mode.*mode='eval'"):
        found.own("margin")


def test_an_opaque_loss_has_no_outputs():
    data = (torch.ones(3, 2),)
    risk = ritz.Risk(nn.Linear(2, 1), data=data, batch_loss=lambda model, batch: (model(batch[0]).sum(), 3))
    with pytest.raises(UnsupportedError, match="batch_loss"):
        sample_outputs(risk)


def test_what_is_not_a_risk_is_refused():
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        sample_outputs(nn.Linear(2, 1))


def test_every_column_is_float64_on_the_host():
    found = sample_outputs(table_risk(LOGITS, [0] * len(LOGITS), torch.float32))
    assert isinstance(found, Outputs)
    assert {getattr(found, name).dtype for name in (*COLUMNS, "input_norm2")} == {torch.float64}
