"""Kronecker-factored curvature against the dense matrices that it stands for, and against curvlinops."""

import copy

import cases
import pytest
import torch
from cases import draw, seeded
from torch import Tensor, nn

import ritz
from ritz.captures import Capture
from ritz.errors import NumericalWarning, UnsupportedError
from ritz.operators.kronecker import KFACOperator, eigenbasis
from ritz.operators.layer_factors import Collector
from ritz.operators.units import units_of
from ritz.testing import check_operator

curvlinops = pytest.mark.oracle("curvlinops")
N, CLASSES = 11, 3


LABELS = torch.arange(N) % CLASSES
TARGETS = {"ce": LABELS, "mse": draw(N, CLASSES, seed=9)}
LOSSES = {"ce": nn.CrossEntropyLoss(), "mse": nn.MSELoss()}


class Pooled(nn.Module):
    """The same weights at every token, and the mean of tokens as output."""

    def __init__(self, embedded: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=0) if embedded else nn.Identity()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.embedding(x))).mean(1))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 2, bias=False, padding=(1, 0), dilation=(2, 1)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, CLASSES),
    )


NETWORKS = {
    "mlp": (lambda: cases.mlp((5, 4, CLASSES)), draw(N, 5)),
    "conv": (conv, draw(N, 2, 6, 6)),
    "pooled": (Pooled, draw(N, 6, 5)),
}


def risk_of(network: str, loss: str, samples: int = N, **keywords) -> ritz.Risk:
    build, X = NETWORKS[network]
    data = [(X[:4][:samples], TARGETS[loss][:4][:samples]), (X[4:], TARGETS[loss][4:])][: 1 if samples <= 4 else 2]
    return ritz.Risk(seeded(build), LOSSES[loss], data, **keywords)


def block_diagonal(matrix: Tensor, operator: KFACOperator) -> Tensor:
    """The part of a matrix within the blocks of an operator."""
    kept = torch.zeros_like(matrix)
    for unit in operator.units.values():
        index = torch.cat([torch.arange(matrix.shape[0])[operator.space.slices[name]] for name in unit.params.values()])
        kept[index[:, None], index] = matrix[index[:, None], index]
    return kept


# ------------------------------------------------------------------------------------------- where it is exact


def test_for_one_linear_layer_under_squared_error_it_is_the_ggn():
    model, X = seeded(lambda: nn.Linear(5, 3)), draw(N, 5)
    risk = ritz.Risk(model, nn.MSELoss(), (X, TARGETS["mse"]), batch_size=4)
    assert cases.relative(KFACOperator(risk).dense(), ritz.GGN(risk).dense()) < 1e-12


@pytest.mark.parametrize("ekfac", [False, True])
def test_for_a_deep_linear_network_under_squared_error_its_blocks_are_those_of_the_ggn(ekfac):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3)))
    problem = cases.Problem(
        model, nn.MSELoss(), [(draw(N, 5)[:4], TARGETS["mse"][:4]), (draw(N, 5)[4:], TARGETS["mse"][4:])]
    )
    operator = KFACOperator(problem.risk(), ekfac=ekfac)
    truth = block_diagonal(cases.dense_ggn(problem), operator)
    assert cases.relative(operator.dense(), truth) < 1e-11


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_for_one_sample_without_weight_sharing_its_blocks_are_those_of_the_ggn(loss):
    risk = risk_of("mlp", loss, samples=1)
    operator = KFACOperator(risk)
    assert cases.relative(operator.dense(), block_diagonal(ritz.GGN(risk).dense(), operator)) < 1e-11


@pytest.mark.parametrize("kind", ["empirical", "mc"])
def test_for_one_sample_the_other_fishers_are_exact_too(kind):
    risk = risk_of("mlp", "ce", samples=1)
    operator = KFACOperator(risk, kind, num_samples=3, seed=5)
    dense = ritz.EmpiricalFisher(risk) if kind == "empirical" else ritz.Fisher(risk, num_samples=3, seed=5)
    assert cases.relative(operator.dense(), block_diagonal(dense.dense(), operator)) < 1e-11


def test_reduce_is_exact_for_a_linear_network_that_averages_its_tokens():
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), Mean(), nn.Linear(4, 3)))
    risk = ritz.Risk(model, nn.MSELoss(), (draw(N, 6, 5), TARGETS["mse"]), batch_size=4)
    operator = KFACOperator(risk, sharing="reduce")
    truth = block_diagonal(ritz.GGN(risk).dense(), operator)
    assert cases.relative(operator.dense(), truth) < 1e-11
    assert cases.relative(KFACOperator(risk, sharing="expand").dense(), truth) > 0.05


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_expand_is_exact_for_a_linear_layer_with_a_loss_at_every_token():
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    risk = ritz.Risk(model, nn.MSELoss(), (draw(N, 6, 5), draw(N, 6, 3)), batch_size=4)
    operator = KFACOperator(risk)
    assert cases.relative(operator.dense(), block_diagonal(ritz.GGN(risk).dense(), operator)) < 1e-11


def test_an_embedding_has_its_exact_block_where_the_network_is_linear():
    """One token a sample: dW = one-hot (x) g, and under squared error g does not depend on the sample."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)))
    tokens = torch.arange(N) % 5  # two rows are never seen
    risk = ritz.Risk(model, nn.MSELoss(), (tokens, TARGETS["mse"]), batch_size=4)
    operator = KFACOperator(risk)
    assert cases.relative(operator.dense(), block_diagonal(ritz.GGN(risk).dense(), operator)) < 1e-11


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_grouped_convolution_at_one_position_has_the_exact_blocks_of_its_groups(groups):
    model = seeded(lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.Flatten(), nn.Linear(8, 3)))
    risk = ritz.Risk(model, nn.MSELoss(), (draw(N, 4, 3, 3), TARGETS["mse"]), batch_size=4)
    operator = KFACOperator(risk).block("0.*").dense()
    dense = ritz.GGN(risk).block("0.*").dense()
    own = torch.cat([torch.arange(8).repeat_interleave(4 // groups * 9), torch.arange(8)]) // (8 // groups)
    truth = torch.where(own[:, None] == own, dense, 0.0)  # groups do not share a block
    assert cases.relative(operator, truth) < 1e-11


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4)])
def test_a_normalisation_has_the_diagonal_of_the_ggn(norm):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), norm(), nn.Tanh(), nn.Linear(4, 3)))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (draw(N, 5), LABELS), batch_size=4)
    operator = KFACOperator(risk).block("1.*").dense()
    assert cases.relative(operator, ritz.GGN(risk).block("1.*").dense().diagonal().diag()) < 1e-11


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", ["type2", "empirical"])
def test_the_eigenvalues_of_ekfac_are_the_diagonal_of_the_matrix_in_its_basis(network, kind):
    risk = risk_of(network, "ce")
    operator = KFACOperator(risk, kind, ekfac=True)
    dense = (ritz.GGN(risk) if kind == "type2" else ritz.EmpiricalFisher(risk)).dense()
    for name, unit in operator.units.items():
        space, index = operator.blocks()[name], torch.arange(operator.dim)
        where = unit.gather({p: index[operator.space.slices[p]].reshape(s) for p, s in shapes(operator).items()})[0]
        part = dense[where.flatten()[:, None], where.flatten()]
        basis = torch.kron(space.left[0], space.right[0])
        assert cases.relative(space.values.flatten(), (basis * (part @ basis)).sum(0)) < 1e-10


def shapes(operator: KFACOperator) -> dict[str, torch.Size]:
    return dict(zip(operator.space.names, operator.space.shapes, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_ekfac_is_never_further_from_the_ggn_than_kfac(network):
    risk = risk_of(network, "ce")
    operators = [KFACOperator(risk, ekfac=ekfac) for ekfac in (True, False)]
    truth = block_diagonal(ritz.GGN(risk).dense(), operators[0])
    close, far = (float((operator.dense() - truth).norm()) for operator in operators)
    assert close < far


def test_monte_carlo_factors_have_the_type_2_factors_as_their_mean():
    risk = risk_of("conv", "ce")
    exact = KFACOperator(risk).factors()["0"][0][0]
    drawn = torch.stack([KFACOperator(risk, "mc", seed=seed).factors()["0"][0][0] for seed in range(60)])
    error = drawn.std(0) / 60**0.5
    assert float(((drawn.mean(0) - exact) / error).abs().max()) < 4.5


# --------------------------------------------------------------------------------------- against another package


def other(network: str, loss: str, kind: str, sharing: str, ekfac: bool) -> Tensor:
    import curvlinops as clo

    risk = risk_of(network, loss)
    model = copy.deepcopy(risk.model).eval()
    build = clo.EKFACLinearOperator if ekfac else clo.KFACLinearOperator
    operator = build(
        model,
        LOSSES[loss],
        list(model.parameters()),
        [batch.data for batch in risk.batches],
        fisher_type={"type2": "type-2", "empirical": "empirical"}[kind],
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    return operator @ torch.eye(operator.shape[0])


@curvlinops
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["type2", "empirical"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_it_is_the_kfac_of_curvlinops(network, loss, kind, sharing):
    """Their empirical Fisher counts each of the 3 outputs of a squared error as an item: 3 times ours."""
    ours = KFACOperator(risk_of(network, loss), kind, sharing=sharing).dense()
    items = CLASSES if (loss, kind) == ("mse", "empirical") else 1
    assert cases.relative(items * ours, other(network, loss, kind, sharing, ekfac=False)) < 1e-11


@curvlinops
@pytest.mark.parametrize("network", NETWORKS)
def test_it_is_the_ekfac_of_curvlinops(network):
    ours = KFACOperator(risk_of(network, "ce"), ekfac=True).dense()
    assert cases.relative(ours, other(network, "ce", "type2", "expand", ekfac=True)) < 1e-11


# ------------------------------------------------------------------------------------------- as an operator


@pytest.mark.parametrize("ekfac", [False, True])
def test_it_keeps_the_contract_of_operators(ekfac):
    check_operator(KFACOperator(risk_of("mlp", "ce"), ekfac=ekfac))


@pytest.mark.parametrize("ekfac", [False, True])
def test_the_damped_inverse_eigenvalues_trace_and_log_determinant_are_those_of_the_dense_matrix(ekfac):
    operator = KFACOperator(risk_of("conv", "ce"), ekfac=ekfac)
    dense = operator.dense()
    shifted = dense + 0.3 * torch.eye(len(dense))
    assert cases.relative(operator.inverse(0.3).dense(), torch.linalg.inv(shifted)) < 1e-11
    assert cases.relative(operator.eigenvalues(), torch.linalg.eigvalsh(dense)) < 1e-11
    assert float(operator.logdet(0.3)) == pytest.approx(float(torch.logdet(shifted)), rel=1e-11)
    assert float(operator.trace()) == pytest.approx(float(dense.trace()), rel=1e-11)
    parts = operator.logdet(0.3).parts
    assert sum(float(part) for part in parts.values()) == pytest.approx(float(operator.logdet(0.3)))


def test_the_factors_follow_the_weights():
    risk = risk_of("mlp", "ce")
    operator = KFACOperator(risk)
    before = operator.dense()
    with torch.no_grad():
        risk.model[0].weight.mul_(2)
    after = operator.dense()
    assert cases.relative(after, before) > 0.01
    assert torch.equal(after, KFACOperator(risk).dense())


@pytest.mark.parametrize("cut", list(cases.partitions(N)))
def test_it_is_the_same_for_every_cut_into_batches(cut):
    build, X = NETWORKS["conv"]
    model = seeded(build)
    whole = KFACOperator(ritz.Risk(model, LOSSES["ce"], [(X, LABELS)]), "mc", seed=1).dense()
    pieces = KFACOperator(ritz.Risk(model, LOSSES["ce"], cases.split(X, LABELS, cut)), "mc", seed=1).dense()
    assert cases.relative(pieces, whole) < 1e-11


def test_twice_the_loss_is_twice_the_matrix():
    risk = risk_of("conv", "mse")
    twice = ritz.Risk(risk.model, lambda out, y: 2 * nn.functional.mse_loss(out, y), [b.data for b in risk.batches])
    assert cases.relative(KFACOperator(twice).dense(), 2 * KFACOperator(risk).dense()) < 1e-11


def test_frozen_weights_leave_the_block_of_the_bias():
    risk = risk_of("mlp", "mse", params=["0.bias", "2.*"])
    operator = KFACOperator(risk)
    assert operator.units["0"].inputs == 1
    everything = KFACOperator(risk_of("mlp", "mse")).block("0.bias").dense()
    assert cases.relative(operator.block("0.bias").dense(), everything) < 1e-12


def test_a_layer_that_takes_no_part_has_a_zero_block():
    model = seeded(lambda: nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(2, 2)}))
    risk = ritz.Risk(model, LOSSES["ce"], (draw(N, 5), LABELS), forward=lambda m, batch: m["used"](batch[0]))
    operator = KFACOperator(risk)
    assert not operator.block("unused.*").dense().any()
    assert operator.block("used.*").dense().any()
    with pytest.raises(ValueError, match="singular"):
        operator.logdet()


def test_a_layer_called_twice_adds_up_over_its_calls():
    """For a linear network and calls that see the same input, two calls are one call with doubled gradient factor."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x), self.layer(-x)], dim=1)

    risk = ritz.Risk(seeded(Twice), nn.MSELoss(), (draw(N, 5), draw(N, 6)))
    operator = KFACOperator(risk)
    weight = operator.block("layer.weight").dense()
    assert cases.relative(weight, ritz.GGN(risk).block("layer.weight").dense()) < 1e-11


def test_factors_wider_than_the_limit_are_diagonal():
    risk = risk_of("mlp", "ce")
    whole, cut = (KFACOperator(risk, max_factor=most).factors()["0"] for most in (10_000, 5))
    assert torch.equal(cut[0], whole[0])  # 4 wide
    assert torch.allclose(cut[1], whole[1].diagonal(dim1=1, dim2=2))  # 6 wide
    check_operator(KFACOperator(risk, max_factor=5, ekfac=True))


def test_chunks_of_samples_add_up(monkeypatch):
    risk = risk_of("conv", "ce")
    whole = KFACOperator(risk, ekfac=True).dense()
    monkeypatch.setattr("ritz.operators.layer_factors._WORKSPACE", 200)
    assert cases.relative(KFACOperator(risk, ekfac=True).dense(), whole) < 1e-11


# ------------------------------------------------------------------------------------------- refusals, failures


def test_a_parameter_without_a_rule_is_refused():
    model = nn.Sequential(nn.Linear(5, 3), nn.PReLU())
    with pytest.raises(UnsupportedError, match=r"1\.weight belongs to no layer that has Kronecker factors"):
        KFACOperator(ritz.Risk(model, LOSSES["ce"], (draw(N, 5), LABELS)))


def test_tied_weights_are_refused():
    with pytest.raises(UnsupportedError, match="belongs to no layer"):
        KFACOperator(cases.problem("language").risk())


def test_bad_arguments_are_refused():
    risk = risk_of("mlp", "ce")
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        KFACOperator(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="fisher must be one of mc, type2, empirical, got 'true'"):
        KFACOperator(risk, "true")
    with pytest.raises(ValueError, match="sharing must be one of expand, reduce, got 'both'"):
        KFACOperator(risk, sharing="both")
    with pytest.raises(ValueError, match=r"damping must be positive, got 0\.0"):
        KFACOperator(risk).inverse(0.0)
    with pytest.raises(ValueError, match=r"damping must not be negative, got -1"):
        KFACOperator(risk).logdet(-1)


def test_samples_that_do_not_lie_in_rows_are_refused_where_they_matter():
    unit = units_of(nn.Linear(5, 3), ("weight",))
    call = Capture("", nn.Linear(5, 3), draw(7, 5), draw(1, 7, 3), {"weight": "weight"}, {})
    assert Collector(unit).inputs([call], 2)["|rows"] == 7  # all rows count, whichever sample they belong to
    with pytest.raises(UnsupportedError, match="does not hold 2 samples"):
        Collector(unit, "reduce").inputs([call], 2)
    single = Capture("", nn.Conv1d(2, 2, 1), draw(2, 4), draw(1, 2, 4), {"weight": "weight"}, {})
    with pytest.raises(UnsupportedError, match="without a batch dimension"):
        Collector(units_of(nn.Conv1d(2, 2, 1), ("weight",))).inputs([single], 1)


class Encoder(nn.Module):
    """A transformer whose layers have samples or, as is torch's default, tokens in the first dimension."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.first = nn.Linear(5, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=batch_first)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.first(x if self.batch_first else x.transpose(0, 1)))
        return self.last(h.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("places", [6, N, 2 * N])
@pytest.mark.parametrize("keywords", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_where_layers_have_time_in_the_first_dimension_samples_are_found_in_the_second(places, keywords):
    """As many tokens as samples, or some times as many, do not mislead: which is which the gradients tell."""
    params = ["first.*", "layer.linear*", "layer.norm*", "last.*"]  # those that are called as layers
    data = draw(N, places, 5), LABELS
    networks = seeded(lambda: Encoder(False)), seeded(lambda: Encoder(True))
    time, batch = (ritz.Risk(network, LOSSES["ce"], data, params=params) for network in networks)
    found, expected = (KFACOperator(risk, **keywords) for risk in (time, batch))
    assert torch.allclose(found.dense(), expected.dense(), atol=1e-12)
    norms = found.block("layer.norm*").dense()
    assert torch.allclose(norms.diagonal(), ritz.GGN(time).block("layer.norm*").dense().diagonal())


class Failing:
    """torch.linalg.eigh that fails a number of times first."""

    def __init__(self, failures: int) -> None:
        self.left, self.eigh = failures, torch.linalg.eigh

    def __call__(self, matrix: Tensor):
        self.left -= 1
        if self.left >= 0:
            raise torch.linalg.LinAlgError("did not converge")
        return self.eigh(matrix)


@pytest.mark.parametrize(("failures", "said"), [(1, "repeated in float64; to"), (2, "float64 with a jitter")])
def test_a_failing_eigendecomposition_is_repeated_in_float64_then_with_a_jitter(monkeypatch, failures, said):
    factor = cases.symmetric(torch.linspace(0.1, 1, 6)).float()[None]
    values = torch.linalg.eigvalsh(factor)
    monkeypatch.setattr(torch.linalg, "eigh", Failing(failures))
    monkeypatch.setattr("ritz.operators.kronecker._DECOMPOSED_IN", {})  # as on an accelerator
    with pytest.warns(NumericalWarning, match=said):
        found, basis = eigenbasis(factor, name="G of fc")
    assert torch.allclose(found, values, atol=1e-5)
    assert basis.dtype == torch.float32


def test_dead_inputs_do_not_make_the_decomposition_fail():
    """In float32 LAPACK's divide and conquer does not converge on some factors with rows of zeros."""
    x = torch.zeros(128, 257)
    x[:, :200] = draw(128, 200).relu()
    factor = (x.T @ x)[None].float()
    values, vectors = eigenbasis(factor)
    assert torch.allclose((vectors * values[:, None]) @ vectors.mT, factor, atol=1e-4)


def test_where_every_eigendecomposition_fails_the_last_good_basis_is_kept(monkeypatch):
    factor = cases.symmetric(torch.linspace(0.1, 1, 6))[None]
    values, vectors = torch.linalg.eigh(factor)
    monkeypatch.setattr(torch.linalg, "eigh", Failing(6))
    with pytest.warns(NumericalWarning, match="G of fc failed: the eigenvectors before it are kept"):
        found, basis = eigenbasis(2 * factor, vectors, "G of fc")
    assert basis is vectors
    assert torch.allclose(found, 2 * values)
    with pytest.warns(NumericalWarning, match="a factor failed: only its diagonal is used"):
        found, basis = eigenbasis(factor)
    assert basis is None
    assert torch.equal(found, factor.diagonal(dim1=1, dim2=2))


def test_a_factor_that_is_not_finite_is_not_decomposed():
    with pytest.warns(NumericalWarning, match="only its diagonal is used"):
        eigenbasis(torch.tensor([[[1.0, torch.nan], [torch.nan, 1.0]]]))


class Experts(nn.Module):
    """Each sample is for one of two experts, alike in shape; one without work is not called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            own = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(own):
                out = out.index_put((own,), expert(x[own]))
        return out


@pytest.mark.parametrize(("ekfac", "sizes"), [(False, (8, 4)), (False, (8, 3)), (True, (4, 2))])
def test_batches_that_do_not_call_every_expert_give_the_factors_of_the_whole(ekfac, sizes):
    torch.manual_seed(0)
    X = torch.randn(8, 4)
    X[:4, 0], X[4:, 0] = -1.0, 1.0
    model, data = Experts(), (3.0 ** (X[:, :1] > 0) * X, torch.arange(8) % 3)
    whole, cut = (
        ritz.KFACOperator(ritz.Risk(model, nn.CrossEntropyLoss(), data, batch_size=n), ekfac=ekfac).dense()
        for n in sizes
    )
    torch.testing.assert_close(cut, whole)


def test_ekfac_of_rows_that_belong_to_no_sample_is_refused():
    X = torch.tensor([[-1.0, 2.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    risk = ritz.Risk(Experts(), nn.CrossEntropyLoss(), (X, torch.arange(3)))
    with pytest.raises(UnsupportedError, match=r"the rows of experts\.0 are not those of the 3 samples"):
        ritz.KFACOperator(risk, ekfac=True).dense()


# ----------------------------------------------------------------------------------------------- padding


def padded(length: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Two sequences, of three tokens and of two, in `length` places; the loss passes over the rest."""
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))).double()
    X, y = torch.ones(2, length, 5, dtype=torch.float64), torch.full((2, length), -100)
    X[:, :3], y[0, :3], y[1, :2] = draw(2, 3, 5).double(), torch.tensor([0, 1, 2]), torch.tensor([2, 0])
    return model, (X, y)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type2", "empirical"])
def test_padding_has_no_part_in_the_factors(fisher, sharing):
    """As many places as there may be beside them, the factors are those of the tokens alone."""
    found = []
    for length in (3, 9):
        model, data = padded(length)
        risk = ritz.Risk(model, ritz.losses.CrossEntropy(class_dim=2), data)
        found.append(KFACOperator(risk, fisher=fisher, sharing=sharing).factors())
    for name, factors in found[0].items():
        for short, long in zip(factors, found[1][name], strict=True):
            torch.testing.assert_close(short, long)
    (_, inputs), (X, y) = found[0]["0"], padded(3)[1]
    rows = torch.cat([X, torch.ones(2, 3, 1, dtype=torch.float64)], dim=2)
    rows = rows[y != -100] if sharing == "expand" else torch.stack([rows[0, :3].mean(0), rows[1, :2].mean(0)])
    torch.testing.assert_close(inputs[0], rows.T @ rows / len(rows))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_somewhere_in_the_data_means_the_same_for_every_cut_into_batches(sharing):
    """The last token of a language model has no target, and its place counts in no batch, or in all of them."""
    X, y = draw(4, 4, 5).double(), torch.arange(12).reshape(4, 3) % CLASSES
    y[2, 1:] = -100
    model = padded(3)[0]

    def factors(size: int, target: Tensor) -> list[Tensor]:
        risk = ritz.Risk(
            model, ritz.losses.CrossEntropy(class_dim=2), (X, target), batch_size=size,
            forward=lambda model, batch: model(batch[0])[:, :-1],
        )  # fmt: skip
        return [factor for pair in KFACOperator(risk, "mc", sharing=sharing).factors().values() for factor in pair]

    for size in (3, 2, 1):
        for cut, whole in zip(factors(size, y), factors(4, y), strict=True):
            torch.testing.assert_close(cut, whole)


def test_a_place_that_the_loss_passes_over_counts_where_others_see_it():
    """A token of a prompt, say: the loss is not taken of it, and yet a gradient comes back to it."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).cumsum(1))

    X, y = draw(1, 3, 5).double(), torch.tensor([[-100, 1, -100]])
    risk = ritz.Risk(seeded(Seen).double(), ritz.losses.CrossEntropy(class_dim=2), (X, y))
    factors = KFACOperator(risk, fisher="type2").factors()
    rows = torch.cat([X[0, :2], torch.ones(2, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(factors["first"][1][0], rows.T @ rows / 2)
    assert float(factors["last"][1][0, -1, -1]) == 1.0  # the place of the loss alone


# ------------------------------------------------------------------------------ which rows belong to a sample


class Steps(nn.Module):
    """A layer, a normalisation and a layer at every step of a sequence, given with samples or with steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).mean(steps)


@pytest.mark.parametrize("kind", [{"ekfac": True}, {"sharing": "reduce"}, {"params": "norm.*"}])
@pytest.mark.parametrize(("samples", "steps"), [(5, 3), (4, 4), (2, 4)])
def test_steps_may_come_before_samples_inside_the_network(kind, samples, steps):
    X, y, kind = draw(samples, steps, 2).double(), torch.arange(samples) % CLASSES, dict(kind)
    params = kind.pop("params", "*")
    first, second = (
        ritz.KFACOperator(
            ritz.Risk(seeded(Steps).double(), LOSSES["ce"], (X, y), forward=forward, params=params), **kind
        )
        for forward in (
            lambda model, batch: model(batch[0], 1),
            lambda model, batch: model(batch[0].transpose(0, 1), 0),
        )
    )
    torch.testing.assert_close(second.dense(), first.dense())


def test_the_diagonal_of_a_normalisation_of_steps_before_samples_is_that_of_the_ggn():
    risk = ritz.Risk(
        seeded(Steps).double(), LOSSES["ce"], (draw(4, 4, 2).double(), torch.arange(4) % CLASSES), params="norm.*",
        forward=lambda model, batch: model(batch[0].transpose(0, 1), 0),
    )  # fmt: skip
    torch.testing.assert_close(ritz.KFACOperator(risk).dense().diagonal(), ritz.GGN(risk).dense().diagonal())


def nodes(num: int, **keywords) -> ritz.Risk:
    """Labels of the nodes of one graph, which is part of the function and is not cut."""
    X, edges = draw(num, 5), 1.0 * (draw(num, num, seed=1) > 0)
    data = [(X, edges, torch.arange(num) % CLASSES)]
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    return ritz.Risk(model, LOSSES["ce"], data, mode="train", forward=lambda m, b: b[1] @ m(b[0]), **keywords)


def test_rows_that_mix_samples_are_refused_by_what_needs_those_of_each():
    for kind in ({"ekfac": True}, {"sharing": "reduce"}):
        with pytest.raises(UnsupportedError, match=r"rows of 0 are not those of the 6 samples.*KFAC with 'expand'"):
            ritz.KFACOperator(nodes(6), **kind).dense()


def test_a_graph_of_many_nodes_is_not_cut_to_see_whether_the_model_is_the_same():
    risk = nodes(12)
    factors = ritz.KFACOperator(risk).factors()
    X, _, _ = next(iter(risk.batches)).data
    rows = torch.cat([X, torch.ones(12, 1).to(X)], dim=1)
    torch.testing.assert_close(factors["0"][1][0], rows.T @ rows / 12)
    assert bool(ritz.KFACOperator(risk).dense().isfinite().all())


class Views(nn.Module):
    """Two views of every sample go through one encoder as one batch, one view after the other or side by side."""

    def __init__(self, in_turn: bool, norm: nn.Module) -> None:
        super().__init__()
        self.in_turn = in_turn
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 3, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(6, 4), nn.LayerNorm(4)
        )
        self.last = nn.Linear(8, CLASSES)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        if self.in_turn:
            found = self.encoder(torch.cat([one, two])).unflatten(0, (2, -1)).transpose(0, 1)
        else:
            found = self.encoder(torch.stack([one, two], dim=1).flatten(0, 1)).unflatten(0, (-1, 2))
        return self.last(found.tanh().flatten(1))


def views(in_turn: bool, norm: type[nn.Module] = nn.BatchNorm1d, mode: str = "eval") -> ritz.Risk:
    model = seeded(lambda: Views(in_turn, nn.BatchNorm1d(3) if norm is nn.BatchNorm1d else nn.GroupNorm(1, 3)))
    data = (draw(5, 1, 3), draw(5, 1, 3, seed=3), LABELS[:5])
    return ritz.Risk(model, LOSSES["ce"], data, mode=mode)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.GroupNorm])
def test_of_two_views_in_one_batch_each_row_is_of_its_sample(norm):
    risk = views(True, norm)
    truth, found = ritz.GGN(risk).dense().diagonal(), ritz.KFACOperator(risk, ekfac=True)
    for name, unit in found.units.items():
        own = sum(float(truth[risk.space.slices[one]].sum()) for one in unit.params.values())
        assert float(found.trace().parts[name].value) == pytest.approx(own)  # exact in any basis
        if unit.kind == "diagonal":
            torch.testing.assert_close(
                found.dense().diagonal()[risk.space.slices[name]], truth[risk.space.slices[name]]
            )


@pytest.mark.parametrize("kind", [{}, {"ekfac": True}, {"sharing": "reduce"}], ids=["kfac", "ekfac", "reduce"])
def test_batch_statistics_do_not_hide_which_rows_belong_to_a_sample(kind):
    in_turn, side_by_side = (ritz.KFACOperator(views(way, mode="train"), **kind) for way in (True, False))
    torch.testing.assert_close(in_turn.dense(), side_by_side.dense())
    said = "rows as their samples' own under batch statistics"
    assert said in in_turn.convention()
    assert said not in ritz.KFACOperator(views(True), **kind).convention()


class OwnBatchNorm(torch.autograd.Function):
    """With a backward pass of its own, and the scale before what is normalised."""

    @staticmethod
    def forward(ctx, scale: Tensor, x: Tensor) -> Tensor:
        rate = (x.var(0, unbiased=False) + 1e-5).rsqrt()
        found = (x - x.mean(0)) * rate
        ctx.save_for_backward(scale, found, rate)
        return scale * found

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        scale, found, rate = ctx.saved_tensors
        own = grad * scale
        return (grad * found).sum(0), rate * (own - own.mean(0) - found * (own * found).mean(0))


class Normalised(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return OwnBatchNorm.apply(self.weight, x)


@pytest.mark.parametrize("kind", [{"ekfac": True}, {"sharing": "reduce"}], ids=["ekfac", "reduce"])
def test_batch_statistics_by_code_of_the_user_give_the_same(kind):
    plain, own = (
        seeded(lambda norm=norm: nn.Sequential(nn.Linear(3, 4), norm(4), nn.Tanh(), nn.Linear(4, CLASSES)))
        for norm in (nn.BatchNorm1d, Normalised)
    )
    data = [(draw(6, 3), LABELS[:6])]
    found, wanted = (
        ritz.KFACOperator(ritz.Risk(net, LOSSES["ce"], data, mode="train", params=["0.*", "3.*"]), **kind).dense()
        for net in (own, plain)
    )
    torch.testing.assert_close(found, wanted)


def test_outputs_with_several_rows_for_each_sample_have_the_ggn_as_mean():
    """Signs part the rows of a sample, which are items of their own to a loss that does not know of samples."""
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, CLASSES)))
    risk = ritz.Risk(
        net, lambda out, target: nn.functional.cross_entropy(out, target.flatten()),
        (draw(4, 4, 2), torch.arange(16).reshape(4, 4) % CLASSES),
        forward=lambda model, batch: model(batch[0]).flatten(0, 1),
    )  # fmt: skip
    traces = torch.tensor([ritz.KFACOperator(risk, ekfac=True, seed=seed).trace().value for seed in range(40)])
    error = float(traces.std() / len(traces) ** 0.5)
    assert float(traces.mean()) == pytest.approx(float(ritz.GGN(risk).dense().trace()), abs=4 * error)
