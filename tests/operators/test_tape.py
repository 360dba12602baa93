"""Products along a tape are those of dense matrices, and what cannot be followed is left to other ways."""

import copy
import logging

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ritz
from ritz import compilation
from ritz.operators import footprint
from ritz.operators.tape import Tape, Tapes, Untaped, factors, kept, layers, sinks
from ritz.space import ParamSpace

MATRICES = ("Hessian", "GGN", "EmpiricalFisher")
PLAN = ritz.Plan(chunk=50, route="forward")


def made(matrix: str, risk: ritz.Risk) -> ritz.Operator:
    return getattr(ritz, matrix)(risk)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", cases.NAMES)
def test_every_network_is_followed_and_its_matrices_are_the_dense_ones(name, matrix):
    A = made(matrix, cases.problem(name).risk(plan=PLAN))
    truth = cases.truth(name, matrix)
    assert cases.relative(A.dense(), truth) < 1e-11
    assert A._tapes.works
    v = torch.randn(A.dim)
    assert cases.relative(A @ v, truth @ v) < 1e-11


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", ["mlp_relu", "conv", "residual", "residual_train", "attention", "language"])
def test_some_of_the_parameters_have_their_block(name, matrix):
    problem = cases.problem(name)
    names = [n for n, p in problem.model.named_parameters() if p.requires_grad][1::2]
    A, whole = (made(matrix, problem.risk(params=p, plan=PLAN)) for p in (names, "*"))
    inside = torch.cat([torch.arange(s.start, s.stop) for s in (whole.space.slices[n] for n in names)])
    assert cases.relative(A.dense(), cases.truth(name, matrix)[inside][:, inside]) < 1e-11
    assert A._tapes.works


@pytest.mark.parametrize("sizes", list(cases.partitions(11)), ids=str)
def test_the_cut_into_batches_does_not_matter(sizes):
    problem = cases.problem("mlp_relu")
    H = ritz.Hessian(problem.risk(cases.split(*problem.data, sizes), plan=PLAN))
    assert cases.relative(H.dense(), cases.truth("mlp_relu", "Hessian")) < 1e-11


# ----------------------------------------------------------------------------------------------- operations

P = {"a": (3, 4), "b": (4,), "c": (4, 5), "k": (2, 3, 3), "i": (2, 2, 3, 3)}  # parameters, and their shapes
X = (torch.arange(24.0).reshape(2, 3, 4) * 0.37).sin().double()
LAST = torch.channels_last
IMAGE = (torch.arange(150.0).reshape(3, 2, 5, 5) * 0.77).sin().double()
INDEX = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])


def inplace(p: dict[str, Tensor]) -> Tensor:
    y = (p["a"] @ p["c"]).sin()
    y += p["c"][:3]
    return y.mul_(p["b"].sum()).relu_()


def written(p: dict[str, Tensor]) -> Tensor:
    out = p["b"].sin()
    out[torch.tensor([2, 0])] = p["a"][1, :2]
    return out * out


def held(p: dict[str, Tensor]) -> Tensor:
    return p["a"] * p["a"].exp().detach() * p["a"].data + (p["b"] > 0) * p["b"] ** 3


OPERATIONS = {
    "matrices": lambda p: (X @ p["c"]) @ p["c"].T @ p["a"].T,
    "batched matrices": lambda p: torch.bmm(X * p["b"], X.mT * p["a"].sum()),
    "addmm": lambda p: torch.addmm(p["a"], p["a"] @ p["c"], p["c"].T),
    "baddbmm": lambda p: torch.baddbmm(p["a"], X, (p["c"] @ p["c"].T).expand(2, 4, 4)),
    "scaled addmm": lambda p: torch.addmm(p["b"], p["a"], p["c"] @ p["c"].T, beta=2, alpha=3),
    "one matrix twice": lambda p: p["c"] @ p["c"].T @ p["c"],
    "einsum": lambda p: torch.einsum("bij,jk,ik->bi", X, p["c"] @ p["c"].T, p["a"]),
    "sums": lambda p: (p["a"] + p["b"] - 2 * p["a"].mean(0)).square().sum(),
    "alpha": lambda p: torch.add(p["a"], p["b"], alpha=3) ** 2,
    "products and quotients": lambda p: p["a"] * p["b"] / (2 + p["a"].square()) / (3 + p["b"].cos()),
    "powers": lambda p: p["a"].abs() ** 1.5 + (p["b"].square() + 1).sqrt().rsqrt() + p["a"] ** 3,
    "of one element": lambda p: p["a"].exp() * p["b"].sigmoid() + F.softplus(p["a"]) * F.gelu(p["b"]),
    "tanh-gelu": lambda p: F.gelu(p["a"], approximate="tanh") * F.silu(p["b"]) * F.mish(p["a"]),
    "kinks": lambda p: F.relu(p["a"]) * F.leaky_relu(p["b"]) * F.elu(p["a"]) + p["a"].clamp(-0.5, 0.5) * p["b"].abs(),
    "curved kinks": lambda p: F.hardswish(p["a"]) * F.celu(p["b"]) * F.selu(p["a"]),
    "choices": lambda p: torch.where(X > 0, p["a"] * p["b"], p["a"].sin()) + torch.maximum(p["a"], p["b"]) ** 2,
    "masks": lambda p: (p["a"] @ p["c"]).masked_fill(torch.eye(3, 5) > 0, -torch.inf).softmax(-1),
    "softmax": lambda p: (p["a"] * 3).softmax(0) * (X * p["b"]).softmax(-1) + (p["a"] * X).log_softmax(1),
    "attention": lambda p: F.scaled_dot_product_attention(X * p["b"], X * p["a"], X + p["a"], is_causal=True),
    "shapes": lambda p: p["c"].view(2, 10).T.reshape(5, 4).unsqueeze(1).squeeze().flatten() ** 3,
    "transposes": lambda p: (p["i"].permute(3, 0, 2, 1).transpose(0, 1).mT.contiguous().view(6, 6) ** 2).t() * 2,
    "parts": lambda p: p["a"][1:, ::2] * p["c"][0, :2] + p["c"].T[-1, 1:3] ** 2 + p["a"].select(1, -1)[:2, None],
    "splits": lambda p: sum(x * y.sum() for x, y in zip(p["c"].split(2), p["a"].chunk(2, 1), strict=True)) ** 2,
    "unbind": lambda p: p["i"].unbind(1)[0] * p["i"].unbind(1)[1] + p["k"].unbind()[0],
    "expansions": lambda p: (p["b"].expand(2, 3, 4) * p["a"][None].expand(2, -1, -1)) ** 2 + p["a"].repeat(2, 1, 1),
    "reductions": lambda p: p["a"].mean() * p["a"].sum(0) * p["a"].mean((0, 1), keepdim=True) + p["c"].sum(-1) ** 2,
    "reductions of a number": lambda p: p["a"].sum().exp().sum(0) * p["b"].mean().mean(-1) ** 2 + p["a"],
    "a mean of no rows": lambda p: torch.cat([p["a"][:0].square().mean(-1), p["a"].square().mean(-1)]) * p["b"].sum(),
    "extremes": lambda p: p["a"].amax(1) ** 2 * p["a"].max(0)[0].sum() + p["c"].sort(0)[0][0, :3],
    "soft extremes": lambda p: p["a"].logsumexp(1) * p["a"].prod(),
    "side by side": lambda p: torch.cat([p["a"], p["c"].T, p["b"][None]]) ** 2 * torch.stack([p["b"], -p["b"]]).prod(0),
    "beside what is repeated": lambda p: torch.cat([p["b"].expand(2, 4), p["a"]]) ** 2,
    "indices": lambda p: p["a"][INDEX[:, 0]] * p["b"][INDEX].sum() + p["a"].gather(0, INDEX) ** 2,
    "chosen": lambda p: p["a"].index_select(1, INDEX[0]) ** 2,
    "embedding": lambda p: F.embedding(INDEX, p["a"]) ** 2 @ F.embedding(INDEX, p["a"]).mT,
    "cumulative": lambda p: p["a"].cumsum(0) ** 2 * p["b"].cumprod(0) + p["a"].norm(dim=1, keepdim=True),
    "layer norm": lambda p: F.layer_norm(p["a"] * X, (4,), p["b"], p["b"].sin()) * p["a"],
    "layer norm, plain": lambda p: F.layer_norm(p["a"] * X, (3, 4)) ** 3,
    "layer norm of data": lambda p: F.layer_norm(X, (4,), p["b"], p["b"] ** 2).square(),
    "rms norm": lambda p: F.rms_norm(p["a"] * X, (4,), p["b"]) ** 2,
    "group norm": lambda p: F.group_norm(p["a"][:2] * X[:, :2, None], 1, p["b"][:2], p["b"][2:]).square(),
    "batch norm": lambda p: F.batch_norm(X * p["a"], X[0, :, 0], X[0, :, 1].abs(), p["a"][:, 0], p["a"][:, 1]) ** 2,
    "batch norm in training": lambda p: F.batch_norm(X * p["a"], None, None, p["a"][:, 0], p["a"][:, 1], True) ** 3,
    "instance norm": lambda p: F.instance_norm(X * p["a"] * p["b"]) ** 3,
    "convolution": lambda p: F.conv2d(F.conv2d(IMAGE, p["i"], p["b"][:2], padding=1).tanh(), p["i"], stride=2),
    "convolution of data": lambda p: F.conv2d(IMAGE, p["i"], None).tanh() + p["i"][:, :, :, :1].sum(),
    "bias of a convolution": lambda p: F.conv2d(IMAGE, IMAGE[:2, :, :3, :3], p["b"][1:3]).tanh(),
    "groups": lambda p: F.conv2d(IMAGE * p["b"].sum(), p["k"][:, None], groups=2, dilation=2, padding=2).square(),
    "transposed convolution": lambda p: F.conv_transpose2d(IMAGE * p["b"][0], p["i"], p["b"][:2], stride=2).tanh(),
    "convolution in one dimension": lambda p: F.conv1d(X * p["a"], p["a"][None, :, :2], p["b"][:1], padding=1).tanh(),
    "strides that leave a rest": lambda p: F.conv2d(F.conv2d(IMAGE, p["i"], padding=2).sin(), p["i"], None, 3, 1),
    "dilation": lambda p: F.conv2d(IMAGE * p["b"].sum(), p["i"], stride=2, dilation=2, padding=2).square(),
    "channels last": lambda p: F.conv2d(IMAGE.contiguous(memory_format=LAST), p["i"], padding=1).tanh() * p["b"][0],
    "windows of channels last": lambda p: F.max_pool2d(F.conv2d(IMAGE.contiguous(memory_format=LAST), p["i"]), 2) ** 2,
    "largest of windows": lambda p: F.max_pool2d(F.conv2d(IMAGE, p["i"], padding=1), 3, 1) ** 2,
    "means of windows": lambda p: F.avg_pool2d(F.conv2d(IMAGE, p["i"]), 2) ** 2,
    "means of all": lambda p: F.adaptive_avg_pool2d(F.conv2d(IMAGE, p["i"]), 1) ** 2,
    "a kink that is broadcast": lambda p: (p["a"] @ p["b"]).clamp(X[0, :, :3], None) ** 2,
    "in place": inplace,
    "written into": written,
    "constants of values": held,
    "a parameter itself": lambda p: p["a"],
    "a view of a parameter": lambda p: p["c"].T[1:],
    "nothing": lambda p: X,
}  # fmt: skip


def flat(tensors, lead: int = 0) -> Tensor:
    """Side by side."""
    return torch.cat([x.flatten(lead) for x in tensors], lead)


def gradient(value: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """By plain autograd, with a graph; zero where there is none."""
    if not value.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)


FOLDED = (
    "convolution", "convolution of data", "convolution in one dimension", "strides that leave a rest", "dilation",
    "channels last", "windows of channels last", "largest of windows", "means of windows",
)  # fmt: skip
LOOPED = ("groups", "transposed convolution")  # on a GPU too


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", ["conv", "residual", "residual_train", "pixels"])
def test_networks_that_are_convolved_so_have_the_same_matrices(name, matrix, monkeypatch):
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",))
    A = made(matrix, cases.problem(name).risk(plan=PLAN))
    assert cases.relative(A.dense(), cases.truth(name, matrix)) < 1e-11
    assert A._tapes.works


@pytest.mark.parametrize(
    ("name", "on_gpu"), [*((name, False) for name in OPERATIONS), *((name, True) for name in (*FOLDED, *LOOPED))]
)
def test_every_operation_has_its_derivatives(name, on_gpu, monkeypatch):
    """Against plain autograd: J'u, J v as the gradient of v . J'u in u, and the Hessian of g . f along v.

    As on a GPU vectors are convolved side by side, where a convolution has no groups and is not a transposed one.
    """
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",) if on_gpu else ())
    fn, draw = OPERATIONS[name], torch.Generator().manual_seed(1)
    params = {n: torch.randn(shape, generator=draw) for n, shape in P.items()}
    space = ParamSpace(tuple(P), tuple(map(torch.Size, P.values())))
    rows = space.split(torch.randn(3, space.dim, generator=draw))  # parts of one tensor
    inputs = tuple(p.clone().requires_grad_() for p in params.values())
    out = fn(dict(zip(params, inputs, strict=True)))
    bars, bar = torch.randn(3, *out.shape, generator=draw), torch.randn(out.shape, generator=draw)
    u = torch.zeros_like(out, requires_grad=True)
    back, slope = (gradient((x * out).sum(), inputs) for x in (u, bar))
    pulled, pushed, bent = [], [], []
    for i in range(3):
        v = flat(x[i] for x in rows.values())
        pulled.append(flat(gradient((bars[i] * out).sum(), inputs)))
        pushed.append(gradient(flat(back) @ v, (u,))[0])
        bent.append(flat(gradient(flat(slope) @ v, inputs)))
    tape = Tape(fn, params)
    assert any(getattr(rule, "folds", False) for rule in tape.rules) == (on_gpu and name in FOLDED)
    torch.testing.assert_close(tape.out, out.detach())
    torch.testing.assert_close(tape.push(rows)[0], torch.stack(pushed).detach())
    image = {n: torch.full((3, *p.shape), torch.nan) for n, p in params.items()}
    tape.pull(bars, image)
    pulled, bent = torch.stack(pulled).detach(), torch.stack(bent).detach()
    torch.testing.assert_close(flat(image.values(), 1), pulled)
    for scale in (1.0, 1.0, 2.0):  # new, kept, and of another number of the outputs
        tape.bend(bars, scale * bar, tape.push(rows, keep=True)[1], image)
        torch.testing.assert_close(flat(image.values(), 1), pulled + scale * bent)


# ------------------------------------------------------------------------------- what cannot be followed


class Cube(torch.autograd.Function):
    """x^3, with the derivative of nothing that is seen from below."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


def switched_off(x: Tensor) -> Tensor:
    with torch.no_grad():
        held = x.exp()
    return x * held


def differentiated(x: Tensor) -> Tensor:
    y = torch.zeros_like(x).requires_grad_()
    (slope,) = torch.autograd.grad((x * (1 + y)).sin().sum(), y, create_graph=True)
    return x + slope


def by_another_name(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.view(-1)
    y.mul_(2)
    return z.reshape(x.shape)


def into_a_part(x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1] + 1)
    out[:, 1:] = x.sin()
    return out[:, 1:] + out[:, :1]


HARD = {
    "a custom function": (Cube.apply, "gradients switched off"),
    "gradients off": (switched_off, "gradients switched off"),
    "gradients of its own": (differentiated, "requires a gradient"),
    "softmax of a number": (lambda x: x.sin() * x.sum().softmax(0), "single number"),
    "two names": (by_another_name, "through another tensor"),
    "a part of a constant": (into_a_part, "by an unknown operation"),
    "statistics of a norm": (lambda x: x * torch.native_layer_norm(x, (3,), None, None, 1e-5)[1], "statistic of"),
}  # fmt: skip


class Hard(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.first, self.last, self.fn = nn.Linear(4, 3), nn.Linear(3, 2), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fn(self.first(x)))


@pytest.mark.parametrize("what", HARD)
def test_what_cannot_be_followed_is_done_in_another_way(what, caplog):
    fn, reason = HARD[what]
    torch.manual_seed(0)
    problem = cases.Problem(Hard(fn), nn.CrossEntropyLoss(), [(torch.randn(6, 4), torch.randint(2, (6,)))])
    with caplog.at_level(logging.INFO, "ritz"):
        G = ritz.GGN(problem.risk(plan=PLAN))
        found = G.dense()
    assert reason in caplog.text
    assert not G._tapes.works
    assert cases.relative(found, cases.dense_ggn(problem)) < 1e-10
    v = torch.randn(G.dim)
    assert cases.relative(ritz.GGN(problem.risk()) @ v, cases.dense_ggn(problem) @ v) < 1e-10
    if what != "gradients off":  # whose gradient is that of no function
        H = ritz.Hessian(problem.risk(plan=ritz.Plan(chunk=50)))
        assert cases.relative(H.dense(), cases.dense_hessian(problem)) < 1e-10


def test_a_parameter_that_is_written_to_is_refused():
    with pytest.raises(Untaped, match="writes to a parameter"):
        Tape(lambda p: p["w"].add_(1.0), {"w": torch.ones(2)})


def test_random_numbers_are_refused():
    with pytest.raises(Untaped, match="draws random numbers"):
        Tape(lambda p: torch.bernoulli(p["w"]), {"w": torch.full((2,), 0.5)})


def test_a_constant_that_is_written_to_after_its_use_is_refused():
    def fn(p: dict[str, Tensor]) -> Tensor:
        scale = torch.ones(2)
        out = p["w"] * scale
        scale.add_(1.0)
        return out

    with pytest.raises(Untaped, match="written to after"):
        Tape(fn, {"w": torch.ones(2)})


def test_a_model_at_fault_says_so_itself():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.calls = nn.Parameter(torch.ones(3)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls < 0:
                raise KeyError("out of calls")
            return x * self.w

    model = Broken()
    G = ritz.GGN(ritz.Risk(model, nn.MSELoss(), (torch.ones(2, 3), torch.ones(2, 3))))
    G.rows(torch.ones(2, 3))
    model.calls = -10
    with pytest.raises(KeyError, match="out of calls"):
        G.rows(torch.ones(2, 3))


def test_dropout_is_followed_with_the_masks_of_each_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    data = torch.randn(8, 4), torch.randint(3, (8,))
    made = [
        ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), data, dropout=True, batch_size=4), route)
        for route in ("forward", "reverse")
    ]
    torch.testing.assert_close(*(H.dense() for H in made), rtol=1e-10, atol=1e-12)
    assert made[0]._tapes.works


def test_an_image_is_right_whatever_was_in_its_memory(monkeypatch):
    """Places of parameters that nothing flows back to are cleared, others overwritten before they are added to."""
    real = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *shape, **kw: real(self, *shape, **kw).fill_(torch.nan))
    for name in ("unused", "language", "attention"):
        H = ritz.Hessian(cases.problem(name).risk(plan=PLAN))
        assert cases.relative(H.dense(), cases.truth(name, "Hessian")) < 1e-11


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "seen through its transpose"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("columns", [1, sinks.NARROW, sinks.NARROW + 1])
@pytest.mark.parametrize("rows", [2, sinks.TALL])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_matrices_are_multiplied_into_memory_of_either_order(left, right, rows, columns, beta, turned):
    """As their transposes where that is faster, and over numbers that are none where these are to be overwritten."""
    k, a, b = max(left, right), torch.randn(left, rows, 5), torch.randn(right, 5, columns)
    given = torch.randn(k, rows, columns) if beta else torch.full((k, rows, columns), torch.nan)
    out = given.mT.clone(memory_format=torch.contiguous_format).mT if turned else given.clone()
    truth = torch.einsum("krm,kmc->krc", a.expand(k, -1, -1), b.expand(k, -1, -1))
    torch.testing.assert_close(sinks.product(a, b, out, beta), truth + given if beta else truth)
    torch.testing.assert_close(out, truth + given if beta else truth)
    torch.testing.assert_close(sinks.product(a, b), truth)


# ------------------------------------------------------------------------------------------ tapes that are kept


def network() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers), (torch.randn(10, 1, 4, 4), torch.randint(3, (10,)))


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """Counts forward passes."""
    counted = [0]
    call = ritz.Risk._call

    def counting(self, *args):
        counted[0] += 1
        return call(self, *args)

    monkeypatch.setattr(ritz.Risk, "_call", counting)
    return counted


@pytest.mark.parametrize("matrix", MATRICES)
def test_the_forward_pass_of_a_batch_is_done_once_for_all_products(matrix, forwards):
    model, data = network()
    A = made(matrix, ritz.Risk(model, nn.CrossEntropyLoss(), data, batch_size=4, plan=PLAN))
    V = A.probes(range(3), seed=0)
    first = A.rows(V)
    before = forwards[0]
    assert torch.equal(A.rows(V), first)
    assert torch.equal(A.rows(V[:1]), made(matrix, A.risk).rows(V[:1]))
    assert forwards[0] == before + 3  # of the other operator


def weight(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1.5)


def weight_data(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    model[0].weight.data.mul_(1.5)  # torch does not count it


def another_weight(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    model[0].weight = nn.Parameter(2 * model[0].weight.detach())


def a_buffer(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    model[1].running_mean += 1.0


def a_setting(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    model[1].eps = 0.5


def a_module(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    model[2] = nn.Sigmoid()


def inputs(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    data[0].mul_(2.0)


def inputs_uncounted(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    data[0].data.mul_(2.0)


def inputs_by_numpy(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    shared = data[0].numpy()
    shared *= 2.0


def class_weights(model: nn.Module, data: tuple[Tensor, Tensor], classes: Tensor) -> None:
    classes[0] = 3.0


CHANGES = (
    weight, weight_data, another_weight, a_buffer, a_setting, a_module, inputs, inputs_uncounted, inputs_by_numpy,
    class_weights,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_kept_tape_is_forgotten_when_something_changes(matrix, change):
    model, data = network()
    classes = torch.ones(3)
    plans = ritz.Plan(route="forward"), ritz.Plan(route="forward", cache=False)
    kept_ones, plain = (made(matrix, ritz.Risk(model, nn.CrossEntropyLoss(classes), data, plan=p)) for p in plans)
    V = plain.probes(range(2), seed=0)
    before = plain.rows(V)
    assert torch.equal(kept_ones.rows(V), before)
    change(model, data, classes)
    after = plain.rows(V)
    assert cases.relative(after, before) > 1e-3
    torch.testing.assert_close(kept_ones.rows(V), after, rtol=1e-12, atol=1e-14)


def test_a_tape_belongs_to_the_settings_that_it_was_written_with():
    model, data = network()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data)
    tapes, found = Tapes(risk), []
    for eps, written in ((0.5, False), (1e-5, True), (0.5, True)):
        model[1].eps = eps
        tapes.refresh()
        with risk.session():
            found += [tapes.along(risk.params(), batch, lambda tape: tape.out) for batch in risk.batches if written]
    assert cases.relative(*found) > 1e-3


@pytest.mark.parametrize("why", ["not cached", "replayed", "dropout", "a module of the user's", "no room"])
def test_when_tapes_are_not_kept(why, monkeypatch, forwards):
    model, data = network()
    keywords, plan = {}, {}
    if why == "not cached":
        plan = {"cache": False}
    if why == "replayed":
        plan = {"replay": True}
    if why == "dropout":
        keywords = {"dropout": True}
    if why == "a module of the user's":
        model = nn.Sequential(model, type("Mine", (nn.Tanh,), {})())
    if why == "no room":
        monkeypatch.setattr(kept, "MOST", 0)
    G = ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(**plan), **keywords))
    V = G.probes(range(2), seed=0)
    G.rows(V)
    before = forwards[0]
    G.rows(V)
    assert forwards[0] == before + 1


def test_tapes_are_kept_up_to_a_size(monkeypatch, forwards):
    model, (X, y) = network()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=5)
    with risk.session():
        size = 2 * Tapes(risk).along(risk.params(), next(iter(risk.batches)), lambda tape: tape).size
    size += X[:5].nbytes + y[:5].nbytes
    monkeypatch.setattr(kept, "MOST", size)
    G = ritz.GGN(risk)
    V = G.probes(range(2), seed=0)
    G.rows(V)
    before = forwards[0]
    G.rows(V)
    assert forwards[0] == before + 1  # of the second batch
    assert 8 * (X[:5].numel() + 2 * 5 * 8) < size < 1e6


def test_an_operator_is_copied_without_its_tapes():
    model, data = network()
    G = ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), data))
    V = G.probes(range(2), seed=0)
    found = G.rows(V)
    other = copy.deepcopy(G)
    assert not other._tapes.keeps
    assert torch.equal(other.rows(V), found)


# ------------------------------------------------------------------------------------------ few outputs, in factors


@pytest.fixture
def everywhere(monkeypatch) -> None:
    """Factors also where they take more work, and for modules of the tests' own."""
    monkeypatch.setattr(kept, "pays", lambda tape, size, k: tape.placed and tape.out.numel() % size == 0)
    monkeypatch.setattr(ritz.Risk, "static", True)


def are_factored(A: ritz.Operator) -> list[bool]:
    """Of the batches for which it pays, in order."""
    return [tape is not None for tape in A._tapes._factored.values()]


NOT_APART = ("residual_train", "attention")  # statistics of the batch; samples that are not the first dimension


@pytest.mark.parametrize("matrix", ["GGN", "EmpiricalFisher"])
@pytest.mark.parametrize("name", cases.NAMES)
def test_products_in_factors_are_those_of_dense_matrices(name, matrix, everywhere):
    A = made(matrix, cases.problem(name).risk(plan=PLAN))
    for _ in range(2):  # found, and kept
        assert cases.relative(A.dense(), cases.truth(name, matrix)) < 1e-11
    assert are_factored(A).count(True) == (0 if name in NOT_APART else 3)


class Mixed(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.layer, self.fn = nn.Linear(4, 2), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.layer, x)


MIXED = {
    "all, behind probabilities": lambda layer, x: (layer(x) - layer(x).mean(0)).softmax(1),  # which add up to 1
    "those after it": lambda layer, x: layer(x).flip(0).cumsum(0).flip(0),
    "other places": lambda layer, x: layer(x).roll(1, 0),
    "the last of steps, which come first": lambda layer, x: layer(torch.stack([x, 2 * x]))[-1],
    "twice, the second time": lambda layer, x: layer(x.repeat(2, 1))[len(x) :],
    "a weight that all read, but most as nothing": lambda layer, x: F.linear(x, layer.weight.exp()),
}


@pytest.mark.parametrize("size", [2, 3, 4, 9])
@pytest.mark.parametrize("what", MIXED)
def test_samples_that_reach_others_or_stand_elsewhere_are_noticed(what, size, everywhere):
    torch.manual_seed(0)
    x, y = torch.randn(size, 4), torch.rand(size, 2)
    if what == "a weight that all read, but most as nothing":
        x[1:] = 0.0
    problem = cases.Problem(Mixed(MIXED[what]), nn.MSELoss(), [(x, y)], mode="train")
    G = ritz.GGN(problem.risk(plan=PLAN))
    assert cases.relative(G.dense(), cases.dense_ggn(problem)) < 1e-11
    assert not any(are_factored(G))


def test_products_are_the_same_bits_where_some_of_the_batches_are_in_factors(everywhere):
    problem = cases.problem("residual_train")
    G = ritz.GGN(problem.risk(cases.split(*problem.data, (1, 6, 4)), plan=PLAN))
    V = G.probes(range(3), seed=0)
    assert torch.equal(G.rows(V), G.rows(V))
    assert are_factored(G) == [True, False, False]  # one sample has none to reach


def test_layers_in_another_precision_than_the_outputs_are_not_in_factors():
    x, w = torch.ones(2, 3), {"w": torch.ones(3, 1)}
    assert factors.factored(Tape(lambda p: x @ p["w"], w), size=2) is not None
    assert factors.factored(Tape(lambda p: (x @ p["w"]).float(), w), size=2) is None


def test_a_factor_holds_its_own_memory_alone():
    x = torch.ones(2, 100)
    tape = Tape(lambda p: torch.cat([x, x @ p["w"]], 1).sin() @ torch.ones(101, 3), {"w": torch.ones(100, 1)})
    *_, joint = factors.factored(tape, size=2).rules
    assert joint.factor.untyped_storage().nbytes() == joint.factor.nbytes == 2 * 3 * 1 * 8


def dense(classes: int, size: int = 6, wide: int = 300) -> ritz.Risk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, wide), nn.Tanh(), nn.Linear(wide, 200), nn.ReLU(), nn.Linear(200, classes))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(size, 90), torch.randint(classes, (size,))))


@pytest.mark.parametrize(
    ("classes", "k", "wide", "used"),
    [(2, 8, 300, True), (2, 1, 300, False), (5, 8, 300, True), (10, 4, 300, False), (2, 8, 20, False)],
)
def test_factors_are_used_for_few_outputs_many_vectors_and_wide_layers(classes, k, wide, used):
    G = ritz.GGN(dense(classes, wide=wide))
    G.rows(G.probes(range(k), seed=0))
    assert are_factored(G) == [True] * used


def test_factors_are_found_once_and_forgotten_with_the_weights(monkeypatch):
    risk = dense(2)
    G, found = ritz.GGN(risk), []
    monkeypatch.setattr(kept, "factored", lambda *args: found.append(1) or factors.factored(*args))
    V = G.probes(range(8), seed=0)
    before = G.rows(V)
    assert torch.equal(G.rows(V), before)
    assert len(found) == 1
    with torch.no_grad():
        risk.model[2].weight.mul_(1.5)
    after = G.rows(V)
    assert len(found) == 2
    assert cases.relative(after, before) > 1e-3
    assert cases.relative(after, ritz.GGN(dense_like(risk)).rows(V)) < 1e-12


def dense_like(risk: ritz.Risk) -> ritz.Risk:
    """The same, of which nothing is kept."""
    return ritz.Risk(risk.model, nn.CrossEntropyLoss(), next(iter(risk.batches)).data, plan=ritz.Plan(cache=False))


def test_factors_are_kept_up_to_a_size(monkeypatch):
    risk = dense(2, size=12)
    monkeypatch.setattr(kept, "FACTORS", ROOM)
    G = ritz.GGN(ritz.Risk(risk.model, nn.CrossEntropyLoss(), next(iter(risk.batches)).data, batch_size=6))
    V = G.probes(range(8), seed=0)
    assert cases.relative(G.rows(V), ritz.GGN(dense_like(risk)).rows(V)) < 1e-12
    assert are_factored(G) == [True]


ROOM = 6 * (2 + 3) * (300 + 200 + 2) * 8  # of 6 samples


def test_what_came_before_has_no_part_in_the_bits(monkeypatch):
    """Factors of batches that were cut in another way make room."""
    monkeypatch.setattr(kept, "FACTORS", 2 * ROOM)
    monkeypatch.setattr(footprint, "LARGEST", 4 * 8 * 300 * 8)  # 4 samples with 8 vectors
    monkeypatch.setattr(footprint, "WORTH", 0)
    risk = dense(2, size=12)
    G, other = ritz.GGN(risk), ritz.GGN(risk)
    V = G.probes(range(8), seed=0)
    G.rows(V)
    assert are_factored(G) == [True] * 3
    assert torch.equal(G.rows(V[:4]), other.rows(V[:4]))
    assert are_factored(G) == are_factored(other) == [True] * 2


# ------------------------------------------------------------------------------------------ complex numbers, .data


def reversed_alone(risk: ritz.Risk) -> Tensor:
    """The Fisher matrix by plain autograd."""
    F = ritz.Fisher(risk, num_samples=3)
    F._forward_mode = False
    return F.dense()


def check_all(model: nn.Module) -> None:
    """Products of several vectors, and twice of one, are those of dense matrices."""
    torch.manual_seed(1)
    problem = cases.Problem(model, nn.CrossEntropyLoss(), [(torch.randn(6, 4), torch.randint(2, (6,)))])
    risk = problem.risk(plan=PLAN)
    truths = {
        ritz.GGN(risk): cases.dense_ggn(problem),
        ritz.EmpiricalFisher(risk): cases.dense_empirical_fisher(problem),
        ritz.Fisher(risk, num_samples=3): reversed_alone(risk),
    }
    v = torch.randn(risk.dim)
    for A, truth in truths.items():
        for _ in range(3):
            assert cases.relative(A @ v, truth @ v) < 1e-11, A.matrix
        assert cases.relative(A.dense(), truth) < 1e-11, A.matrix


COMPLEX = {
    "a Fourier transform": lambda x: torch.fft.rfft(x, n=4).abs(),
    "two real parts": lambda x: torch.complex(x, x.sin()).abs(),
    "a view": lambda x: torch.view_as_complex(torch.stack([x, x.sin()], -1)).abs(),
    "a power, and back to real numbers": lambda x: torch.view_as_real(torch.fft.fft(x) ** 2)[..., 0],
}


@pytest.mark.parametrize("what", COMPLEX)
def test_complex_numbers_on_the_way_are_no_constants(what):
    torch.manual_seed(0)
    model = Hard(COMPLEX[what])
    check_all(model)
    problem = cases.Problem(model, nn.CrossEntropyLoss(), [(torch.randn(6, 4), torch.randint(2, (6,)))])
    H = ritz.Hessian(problem.risk(plan=PLAN), route="forward")
    assert cases.relative(H.dense(), cases.dense_hessian(problem)) < 1e-11


def test_a_tape_of_complex_numbers_is_refused():
    with pytest.raises(Untaped, match="gives complex numbers"):
        Tape(lambda p: torch.fft.fft(p["w"]).abs(), {"w": torch.ones(2)})


def normalised(x: Tensor) -> Tensor:
    return x / x.data.norm(dim=1, keepdim=True)


DATA = {
    "alone": normalised,
    "before what is not followed": lambda x: torch.fft.fft(normalised(x)).abs(),
    "behind what is not followed": lambda x: normalised(torch.fft.fft(x).abs()),
    "detached": lambda x: x / x.detach().norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("what", DATA)
def test_data_of_a_tensor_is_a_constant_in_every_product(what):
    torch.manual_seed(0)
    check_all(Hard(DATA[what]))


@pytest.mark.parametrize("fn", [switched_off, DATA["behind what is not followed"]])
def test_what_autograd_alone_knows_is_not_compiled(fn, monkeypatch):
    """In single precision, in which a compiled product is held against another one that is compiled."""
    monkeypatch.setattr(compilation, "lowered", lambda graph: graph)
    torch.manual_seed(0)
    problem = cases.Problem(Hard(fn), nn.CrossEntropyLoss(), [(torch.randn(6, 4), torch.randint(2, (6,)))])
    G = ritz.GGN(problem.risk(plan=ritz.Plan(compile=True), dtype=torch.float32))
    V = torch.randn(G.dim, 2)
    for _ in range(3):
        assert cases.relative((G @ V).double(), cases.dense_ggn(problem) @ V) < 1e-5
