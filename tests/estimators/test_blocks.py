"""Spectra of all layers' blocks from one run: each against its dense matrix, and what the run costs."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cases import make, relative, truth
from torch import nn

import ritz
from ritz.estimators.blocks import block_spectra
from ritz.operators import DenseOperator
from ritz.operators.blocks import BlockDiagonal, PaddedBlocks, block_diagonal
from ritz.testing import check_operator

MATRICES = {"Hessian": ritz.Hessian, "GGN": ritz.GGN}
PROBLEMS = ("mlp_relu", "mlp_weighted", "conv", "residual", "attention", "language", "frozen", "unused")


def groups_of(names):
    found = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def dense_blocks(matrix, space, groups):
    """The block-diagonal part of a dense matrix."""
    found = torch.zeros_like(matrix)
    for names in groups.values():
        places = torch.cat([torch.arange(space.slices[n].start, space.slices[n].stop) for n in names])
        found[places[:, None], places] = matrix[places[:, None], places]
    return found


def forward_passes(model):
    """Counts calls of a model."""
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


# ------------------------------------------------------------------------------------------------ the operator


@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_blocks_are_those_of_the_dense_matrix(name, matrix):
    problem = make(name)
    base = MATRICES[matrix](problem.risk())
    groups = groups_of(base.space.names)
    blocks = block_diagonal(base, groups)
    assert isinstance(blocks, BlockDiagonal)
    assert relative(blocks.dense(), dense_blocks(truth(name, matrix), base.space, groups)) < 1e-9


@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
def test_a_scalar_parameter_is_a_block_of_one(matrix):
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature, self.fc = nn.Parameter(torch.tensor(1.3)), nn.Linear(2, 2)

        def forward(self, x):
            return self.temperature * self.fc(x)

    data = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
    base = MATRICES[matrix](ritz.Risk(Tempered(), nn.CrossEntropyLoss(), data, dtype=torch.float64))
    values = block_spectra(base)["temperature"].head
    assert values.tolist() == pytest.approx([float(base.dense()[0, 0])])


@pytest.mark.parametrize("make_base", [
    lambda risk: ritz.Hessian(risk, route="forward"), lambda risk: ritz.EmpiricalFisher(risk),
    lambda risk: ritz.Fisher(risk), lambda risk: ritz.Hessian(risk) + 0.5, lambda risk: ritz.KFACOperator(risk),
])  # fmt: skip
def test_any_matrix_has_blocks(make_base):
    base = make_base(make("mlp_relu").risk())
    groups = groups_of(base.space.names)
    blocks = block_diagonal(base, groups)
    assert relative(blocks.dense(), dense_blocks(base.dense(), base.space, groups)) < 1e-9


def test_it_is_an_operator_like_any_other():
    base = ritz.GGN(make("mlp_relu").risk())
    check_operator(block_diagonal(base, groups_of(base.space.names)))


def test_one_vector_and_many_give_the_same():
    base = ritz.Hessian(make("conv").risk(), route="reverse")
    blocks = block_diagonal(base, groups_of(base.space.names))
    V = blocks.probes(range(3), seed=0)
    assert torch.allclose(blocks.rows(V), torch.cat([blocks.rows(v[None]) for v in V]), atol=1e-12)


class Odd(torch.autograd.Function):
    """Has a first derivative and no second."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].tanh() ** 2)


class WithOdd(nn.Linear):
    def forward(self, x):
        return Odd.apply(super().forward(x))


@pytest.mark.filterwarnings("ignore:no exact Hessian product")
def test_an_operation_without_second_derivative_is_gone_round():
    g = torch.Generator().manual_seed(0)
    risk = ritz.Risk(WithOdd(3, 2), nn.MSELoss(), (torch.randn(5, 3, generator=g), torch.randn(5, 2, generator=g)))
    base = ritz.Hessian(risk)
    assert relative(block_diagonal(base, {"all": base.space.names}).dense(), base.dense()) < 1e-6


# ------------------------------------------------------------------------------------------------- the spectra


@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
@pytest.mark.parametrize("name", ["mlp_relu", "residual", "language", "unused"])
def test_small_blocks_are_found_whole(name, matrix):
    problem = make(name)
    base = MATRICES[matrix](problem.risk())
    found = block_spectra(base, num_steps=20, num_probes=6)
    dense, groups = truth(name, matrix), groups_of(base.space.names)
    assert list(found) == list(groups)
    for group, names in groups.items():
        places = torch.cat([torch.arange(base.space.slices[n].start, base.space.slices[n].stop) for n in names])
        block = dense[places[:, None], places]
        values = torch.linalg.eigvalsh(block)
        s = found[group]
        assert s.trace.exact
        assert torch.allclose(s.head.sort().values, values, atol=1e-9 * float(values.abs().max() + 1))
        assert float(s.trace) == pytest.approx(float(block.trace()), abs=1e-9)
        assert float(s.moment(2)) == pytest.approx(float(block.square().sum()), abs=1e-9)
        own = {name: float(dense[base.space.slices[name], base.space.slices[name]].trace()) for name in names}
        assert {name: float(part) for name, part in s.trace.parts.items()} == pytest.approx(own, abs=1e-9)


@pytest.fixture(scope="module")
def wide():
    """Blocks that are too large to be found whole, beside small ones."""
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    data = torch.randn(30, 12, generator=g), torch.randint(3, (30,), generator=g)
    return ritz.Risk(model, nn.CrossEntropyLoss(), data, batch_size=16)


@pytest.mark.parametrize("reorthogonalize", ["full", "none"])
def test_large_blocks_are_sampled_as_by_a_run_of_their_own(wide, reorthogonalize):
    H = ritz.Hessian(wide, route="reverse")
    found = block_spectra(H, num_steps=12, num_probes=4, seed=3, reorthogonalize=reorthogonalize)
    for layer in ("0", "2"):
        alone = ritz.spectrum(H.block(f"{layer}.*"), 12, 4, seed=3, reorthogonalize=reorthogonalize)
        s = found[layer]
        assert s.dim == alone.dim == 156
        assert torch.allclose(s.tail.alpha[:, :6], alone.tail.alpha[:, :6], atol=1e-9)
        assert torch.allclose(s.tail.beta[:, :6], alone.tail.beta[:, :6], atol=1e-9)
        assert float(s.lambda_max) == pytest.approx(float(alone.lambda_max), rel=1e-6)
        assert float(s.trace) == pytest.approx(float(alone.trace), rel=1e-9)
        parts = [{name: float(part) for name, part in one.trace.parts.items()} for one in (s, alone)]
        assert parts[0] == pytest.approx(parts[1], rel=1e-6, abs=1e-12)
    assert found["4"].trace.exact  # 39 parameters
    assert found.sweeps == 12


def test_the_intervals_hold_the_dense_values(wide):
    found = block_spectra(ritz.GGN(wide), num_steps=12, num_probes=6)
    for layer, s in found.items():
        values = torch.linalg.eigvalsh(ritz.GGN(wide).block(f"{layer}.*").dense())
        low, high = s.trace.interval(0.999)
        assert low - 1e-9 <= float(values.sum()) <= high + 1e-9
        assert float(s.lambda_max) == pytest.approx(float(values.max()), rel=1e-3)


def test_the_data_is_walked_once_a_step_whatever_the_number_of_layers(wide):
    calls = forward_passes(wide.model)
    H = ritz.Hessian(wide, route="reverse")
    H @ torch.zeros(H.dim)  # what is looked at once
    calls.clear()
    steps, batches, layers = 12, 2, 3
    found = block_spectra(H, num_steps=steps, num_probes=4)
    together = len(calls)
    assert together == steps * batches == found.sweeps * batches
    calls.clear()
    for layer in found:
        ritz.spectrum(H.block(f"{layer}.*"), steps, 4, reorthogonalize="none")
    apart = len(calls)
    assert apart >= layers * steps * batches
    wide.model._forward_pre_hooks.clear()


def test_groups_are_layers_parameters_or_globs(wide):
    G = ritz.GGN(wide)
    assert list(block_spectra(G, "layer", 1, 1)) == ["0", "2", "4"]
    assert list(block_spectra(G, "parameter", 1, 1)) == list(G.space.names)
    found = block_spectra(G, {"ends": ["0.*", "4.*"], "biases": "2.bias"}, num_steps=20, num_probes=10)
    assert {name: s.dim for name, s in found.items()} == {"ends": 195, "biases": 12}
    assert float(found["ends"].trace) == pytest.approx(float(G.block(["0.*", "4.*"]).dense().trace()))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda G: block_spectra(G, "layers"), ValueError, "groups must be 'layer', 'parameter' or a dictionary"),
        (lambda G: block_spectra(G, {"a": "nope.*"}), ValueError, "no parameter matches 'nope"),
        (lambda G: block_spectra(G, {"a": "0.*", "b": "*.bias"}), ValueError, r"0\.bias is in two groups"),
        (lambda G: block_spectra(G, {}), ValueError, "the groups contain no parameter"),
        (lambda G: block_spectra(G, num_steps=0), ValueError, "at least 1, got 0 and 4"),
        (lambda G: block_spectra(G, reorthogonalize="locked"), ValueError, "'full' or 'none', got 'locked'"),
        (lambda G: block_spectra(G.risk), TypeError, "expected an operator such as"),
        (lambda G: block_diagonal(G, {"a": ["0.wait"]}), ValueError, r"no parameter is called '0\.wait'"),
        (lambda G: block_spectra(G)["7"], KeyError, "there is no group '7'; there are: 0, 2, 4"),
    ],
)
def test_what_makes_no_sense_is_refused(wide, call, error, match):
    with pytest.raises(error, match=match):
        call(ritz.GGN(wide))


def test_a_zero_matrix_and_an_exhausted_space_do_no_harm():
    zero = block_spectra(DenseOperator(torch.zeros(60, 60)), {"all": "*"}, num_steps=4, num_probes=2)["all"]
    assert float(zero.trace) == 0.0
    assert float(zero.lambda_max) == 0.0
    low_rank = torch.zeros(60, 60)
    low_rank[0, 0] = 5.0
    s = block_spectra(DenseOperator(low_rank), {"all": "*"}, num_steps=10, num_probes=2)["all"]
    assert float(s.lambda_max) == pytest.approx(5.0)
    assert isinstance(block_diagonal(DenseOperator(low_rank), {"all": ["vector"]}), PaddedBlocks)


def test_a_product_that_is_not_finite_names_its_batch(wide):
    bad = wide.at({"2.weight": torch.full((12, 12), math.inf)})
    with pytest.raises(ritz.errors.NonFiniteError, match=r"2\.weight is not finite"):
        block_spectra(ritz.Hessian(bad, route="reverse"))


def test_it_is_saved_drawn_and_told(wide, tmp_path):
    said = []
    found = block_spectra(ritz.GGN(wide), num_steps=4, num_probes=2, progress=lambda *done: said.append(done))
    assert said == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert ritz.load(found.save(tmp_path / "blocks")) == found
    assert found.products == 2 * 4 * 3
    assert "diagonal blocks of GGN" in found.convention
    assert len(found.table().rows) == len(found) == 3
    ax = found.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "2", "4"]
    assert len(repr(found)) < 400  # names and sizes, and no numbers


def test_labels_of_a_figure_of_both_signs_do_not_lie_on_each_other(wide):
    found = block_spectra(ritz.GGN(wide), num_steps=200, num_probes=2)  # all eigenvalues
    spectra = {
        name: replace(s, head=s.head * 1e-9**n - (n == 2) * 1e-9) for n, (name, s) in enumerate(found.spectra.items())
    }
    ax = replace(found, spectra=spectra).plot()
    ax.figure.draw_without_rendering()
    assert ax.get_xlim()[0] < 0
    left, right = ax.get_xlim()
    shown = [label for label in ax.get_xticklabels() if left <= label.get_position()[0] <= right]
    boxes = [label.get_window_extent() for label in shown]
    assert len(boxes) > 3
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_float32_is_as_good_as_it_gets(wide):
    exact, rough = (block_spectra(ritz.GGN(wide.to(dtype=d)), num_steps=8, num_probes=2) for d in (None, torch.float32))
    for layer, s in exact.items():
        assert float(rough[layer].trace) == pytest.approx(float(s.trace), rel=1e-4)
