"""The Hessian against a dense one made by plain autograd, for every network, loss and route."""

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import ritz
from ritz.testing import check_operator

WIDE = ritz.Plan(chunk=200)  # few chunks: these matrices are small
ROUTES = ("forward", "reverse")


@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize("route", ROUTES)
def test_exact_routes_give_the_dense_hessian(name, route):
    H = ritz.Hessian(cases.problem(name).risk(plan=WIDE), route=route)
    assert cases.relative(H.dense(), cases.truth(name, "Hessian")) < 1e-10


@pytest.mark.parametrize("name", cases.NAMES)
def test_central_differences_give_the_dense_hessian_to_six_digits(name):
    H = ritz.Hessian(cases.problem(name).risk(), route="difference")
    V = H.probes(range(4), seed=0, distribution="normal").T
    assert cases.relative(H @ V, cases.truth(name, "Hessian") @ V) < 1e-6


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_chosen_route_conforms(name):
    H = ritz.Hessian(cases.problem(name).risk(plan=WIDE))
    check_operator(H)
    assert H.route in ROUTES
    assert f"{H.route} route" in H.convention()


@pytest.mark.parametrize("matrix", [ritz.GGN, ritz.Hessian, lambda risk: ritz.Hessian(risk, route="forward")])
def test_the_padding_row_of_an_embedding_is_a_parameter_like_any_other(matrix):
    """By `padding_idx` reverse mode leaves its gradient out and forward mode does not: no matrix would be symmetric."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight.normal_()
    data = (torch.tensor([[0, 1], [2, 0], [3, 3]]), torch.tensor([0, 1, 1]))
    padded = matrix(ritz.Risk(model, nn.CrossEntropyLoss(), data)).dense()
    assert model[0].padding_idx == 0
    model[0].padding_idx = None
    torch.testing.assert_close(padded, matrix(ritz.Risk(model, nn.CrossEntropyLoss(), data)).dense())
    torch.testing.assert_close(padded, padded.T)
    assert bool(padded[:3, :3].abs().max() > 0)


class Solved(nn.Module):
    """Operations of matrices, whose backward passes torch takes by another formula where gradients are switched off."""

    def __init__(self, operation):
        super().__init__()
        self.inner, self.matrix, self.operation = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3)), operation

    def forward(self, x):
        return self.operation(self.matrix @ self.matrix.T + torch.eye(3), self.inner(x))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "operation",
    [
        lambda matrix, x: torch.linalg.solve(matrix, x.T).T,
        lambda matrix, x: torch.linalg.det(matrix) * x,
        lambda matrix, x: torch.linalg.slogdet(matrix)[1] * x,
    ],
    ids=["solve", "det", "slogdet"],
)
def test_operations_of_matrices_have_their_second_derivative(operation, route):
    torch.manual_seed(0)
    problem = cases.Problem(Solved(operation), nn.MSELoss(), cases.split(torch.randn(11, 4), torch.randn(11, 3)))
    H = ritz.Hessian(problem.risk(), route=route)
    assert cases.relative(H.dense(), cases.dense_hessian(problem)) < 1e-10


class Normalised(nn.Module):
    """A convolution whose kernel has norms of its own, g v / |v|; it is `weight_norm` written out."""

    def __init__(self, dim):
        super().__init__()
        self.bias, self.head = nn.Parameter(torch.randn(3)), nn.Linear(6, 2)
        self.v, self.dims = nn.Parameter(torch.randn(3, 2, 2)), [d for d in range(3) if d != dim]
        self.g = nn.Parameter(torch.rand(self.v.shape[dim] if dim is not None else ()) + 0.5)
        self.shape = [-1 if d == dim else 1 for d in range(3)]

    def forward(self, x):
        kernel = self.g.view(self.shape) * self.v / self.v.square().sum(self.dims, keepdim=True).sqrt()
        return self.head(torch.conv1d(x, kernel, self.bias).tanh().flatten(1))


@pytest.mark.parametrize("route", ["auto", *ROUTES])
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_normalised_weights_have_their_second_derivative(dim, route):
    """That of torch's own kernel takes the norms for constants."""
    torch.manual_seed(0)
    truth = Normalised(dim)
    X, y, loss = torch.randn(11, 2, 3), torch.randint(2, (11,)), nn.CrossEntropyLoss()
    layer = weight_norm(nn.Conv1d(2, 3, 2), dim=dim)
    weights = layer.parametrizations.weight
    with torch.no_grad():
        for own, same in ((layer.bias, truth.bias), (weights.original0, truth.g), (weights.original1, truth.v)):
            own.copy_(same.view(own.shape))
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), truth.head)
    H = ritz.Hessian(ritz.Risk(model, loss, cases.split(X, y)), route=route)
    order = [truth.bias, truth.g, truth.v, *truth.head.parameters()]  # as in the model
    assert cases.relative(H.dense(), cases.hessian_of(loss(truth(X), y), order)) < 1e-10
    assert H.route != "difference"


def test_the_dense_truth_can_tell_a_wrong_matrix():  # else the tests above could not fail
    H = cases.truth("mlp_relu", "Hessian")
    assert cases.relative(cases.truth("mlp_relu", "GGN"), H) > 1e-2
    mean_of_means = sum(
        cases.dense_hessian(cases.Problem(p.model, p.loss, [batch]))
        for p in [cases.problem("mlp_relu")]
        for batch in p.batches
    )
    assert cases.relative(mean_of_means / 3, H) > 1e-2  # what equal weights for ragged batches would give


def test_batch_statistics_make_another_matrix_than_running_ones():
    train, evaluated = cases.truth("residual_train", "Hessian"), cases.truth("residual", "Hessian")
    assert cases.relative(train, evaluated) > 0.1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["mlp_relu", "language", "unused"])
def test_the_chunk_size_does_not_matter(name, route):
    images = []
    for chunk in (1, 3, 8):
        H = ritz.Hessian(cases.problem(name).risk(plan=ritz.Plan(chunk=chunk)), route=route)
        images.append(H @ H.probes(range(8), seed=0).T)
    torch.testing.assert_close(images[1], images[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(images[2], images[0], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("name", ["mlp_weighted", "mlp_custom", "pixels", "language"])
def test_any_split_into_batches_gives_the_same_matrix(name):
    problem = cases.problem(name)
    X, y = problem.data
    truth = cases.truth(name, "Hessian")
    V = torch.randn(len(truth), 3, generator=torch.Generator().manual_seed(0))
    for sizes in cases.partitions(len(X)):
        H = ritz.Hessian(problem.risk(cases.split(X, y, sizes)), route="reverse")
        assert cases.relative(H @ V, truth @ V) < 1e-10, sizes


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_batch_sizes_and_the_order_of_samples_do_not_matter(sizes, order):
    total = 11
    problem = cases.problem("mlp_weighted")
    X, y = problem.data
    sizes = [*sizes, max(total - sum(sizes), 0)]
    ends = [min(sum(sizes[: i + 1]), total) for i in range(len(sizes))]
    cut = [b - a for a, b in zip([0, *ends], ends, strict=False) if b > a]
    places = torch.tensor(order.sample(range(total), total))
    H = ritz.Hessian(problem.risk(cases.split(X[places], y[places], cut)), route="reverse")
    v = H.probes([0], seed=1)[0]
    assert cases.relative(H @ v, cases.truth("mlp_weighted", "Hessian") @ v) < 1e-10


@pytest.mark.parametrize("route", ROUTES)
def test_pieces_of_a_batch_add_up_to_it(route):
    problem = cases.problem("language")
    H = ritz.Hessian(problem.risk(plan=ritz.Plan(micro_batch=1)), route=route)
    v = H.probes([0], seed=1)[0]
    assert cases.relative(H @ v, cases.truth("language", "Hessian") @ v) < 1e-10


def test_a_multiple_of_the_loss_has_that_multiple_of_the_hessian():
    problem = cases.problem("mlp_custom")
    tenfold = cases.Problem(problem.model, lambda out, y: 10 * cases.charbonnier(out, y), problem.batches)
    H = ritz.Hessian(tenfold.risk(plan=WIDE), route="forward")
    assert cases.relative(H.dense(), 10 * cases.truth("mlp_custom", "Hessian")) < 1e-10


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["conv", "attention", "residual_train"])
def test_single_precision_is_close_to_double(name, route):
    H = ritz.Hessian(cases.problem(name).risk(plan=WIDE, dtype=torch.float32), route=route)
    dense = H.dense()
    assert dense.dtype == torch.float32
    assert cases.relative(dense.double(), cases.truth(name, "Hessian")) < 1e-4
    check_operator(H)


def test_weights_are_read_live():
    problem = cases.make("mlp_mse")
    H = ritz.Hessian(problem.risk(plan=WIDE), route="forward")
    before, version = H.dense(), H.version()
    with torch.no_grad():
        problem.model[0].weight.add_(0.5)
    assert H.version() != version
    assert cases.relative(before, H.dense()) > 1e-2
    assert cases.relative(H.dense(), cases.dense_hessian(problem)) < 1e-10


# ----------------------------------------------------------------------------------------- parameters, losses


@pytest.mark.parametrize("route", ROUTES)
def test_a_block_is_a_sub_matrix_and_has_only_its_own_dimension(route):
    problem = cases.problem("attention")
    H = ritz.Hessian(problem.risk(plan=WIDE), route=route)
    block = H.block(["norm.*", "head.bias"])
    places = torch.cat(
        [torch.arange(H.dim)[H.space.slices[name]] for name in ("norm.weight", "norm.bias", "head.bias")]
    )
    assert block.space.names == ("norm.weight", "norm.bias", "head.bias")
    assert block.dim == 11
    assert cases.relative(block.dense(), cases.truth("attention", "Hessian")[places][:, places]) < 1e-10


def test_frozen_parameters_take_no_part_and_unused_ones_have_zero_curvature():
    assert ritz.Hessian(cases.problem("frozen").risk()).space.names[0] == "2.weight"
    H = ritz.Hessian(cases.problem("unused").risk(plan=WIDE)).dense()
    places = ritz.Hessian(cases.problem("unused").risk()).space.slices["unused"]
    assert not H[places].any()
    assert not H[:, places].any()


def test_tied_weights_are_one_parameter():
    names = ritz.Hessian(cases.problem("language").risk()).space.names
    assert "embedding.weight" in names
    assert "output.weight" not in names


@pytest.mark.parametrize("route", [*ROUTES, "difference"])
def test_a_loss_linear_in_the_weights_has_no_curvature(route):
    model, data = nn.Linear(3, 1), (torch.ones(4, 3), torch.ones(4, 1))
    H = ritz.Hessian(ritz.Risk(model, lambda out, y: (out * y).mean(), data), route=route)
    assert float(H.dense().abs().max()) < 1e-8


@pytest.mark.parametrize("route", [*ROUTES, "difference"])
def test_a_loss_that_is_no_function_of_outputs_has_a_hessian(route):
    """A physics-informed loss: the residual of u' = u at given points, itself with a derivative inside."""
    model = cases.make("mlp_mse").model[:1] + nn.Sequential(nn.Tanh(), nn.Linear(5, 1))
    points = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))

    def residual(network: nn.Module, batch: tuple[torch.Tensor]) -> tuple[torch.Tensor, int]:
        (x,) = batch
        slope = torch.func.vmap(torch.func.jacrev(lambda point: network(point).squeeze(-1)))(x)
        return (slope.sum(-1) - network(x).squeeze(-1)).square().sum(), len(x)

    params = list(model.parameters())
    truth = cases.hessian_of(residual(model, (points,))[0] / 7, params)
    risk = ritz.Risk(model, data=[(points[:4],), (points[4:],)], batch_loss=residual, plan=WIDE)
    assert cases.relative(ritz.Hessian(risk, route=route).dense(), truth) < 1e-7


def test_a_risk_is_asked_for():
    with pytest.raises(TypeError, match=r"expected a ritz\.Risk, got Linear"):
        ritz.Hessian(nn.Linear(2, 2))


def test_an_unknown_route_is_refused():
    with pytest.raises(ValueError, match="route must be one of forward, reverse, difference or auto, got 'sideways'"):
        ritz.Hessian(cases.problem("mlp_mse").risk(), route="sideways")
