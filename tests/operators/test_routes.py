"""Which way a Hessian product is taken, and what happens where one way does not work."""

import contextlib
import logging
import warnings

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import ritz
from ritz.errors import NumericalWarning, UnsupportedError
from ritz.operators.derivatives import missing_operation

# ------------------------------------------------------------ operations that can be differentiated in some ways only


class Cube(torch.autograd.Function):
    """x^3 with a backward that can be differentiated again, and no forward derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class OldCube(torch.autograd.Function):
    """The same in the old style, which torch.func does not take at all."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    backward = staticmethod(Cube.backward)


class OnceCube(Cube):
    """A backward that is not to be differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class OldOnceCube(OldCube):
    """The same in the old style."""

    backward = staticmethod(OnceCube.backward)


class DetachedCube(Cube):
    """A backward that forgets where it came from, and does not say so."""

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0].detach() ** 2 * g


class WrongForwardCube(Cube):
    """A forward derivative that is wrong."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, t):
        return 2 * ctx.saved_tensors[0] ** 2 * t


class Net(nn.Module):
    """Two linear layers and an operation between them."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(3, 4), nn.Linear(4, 2), operation

    def forward(self, x):
        return self.last(self.operation(self.first(x)))


def plain_cube(x):
    return x**3


def net_risk(operation, **keywords):
    """The risk of a network with that operation, and of the same with x**3 written out, as Hessian and GGN truth."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, X, y = Net(operation), torch.randn(7, 3), torch.randint(0, 2, (7,))
    batches = cases.split(X, y, (4, 3))
    truth_model = Net(plain_cube)
    truth_model.load_state_dict(model.state_dict())
    truth = cases.Problem(truth_model, nn.CrossEntropyLoss(), batches)
    return ritz.Risk(model, nn.CrossEntropyLoss(), batches, **keywords), truth


# --------------------------------------------------------------------------------------------- the choice


def test_auto_takes_an_exact_route_and_says_which():
    H = ritz.Hessian(cases.problem("mlp_mse").risk())
    assert H.route == "auto"
    H @ torch.ones(H.dim)
    assert H.route in ("forward", "reverse")
    assert H.convention().endswith(f"{H.route} route")


def test_the_faster_of_two_routes_is_taken_where_there_is_no_tape(monkeypatch):
    for slow, wanted in (("_forward", "reverse"), ("_reverse", "forward")):
        H = ritz.Hessian(cases.problem("mlp_mse").risk())
        H._tapes.works = False
        quick = getattr(H, slow)

        def slowed(*args, quick=quick):
            end = torch.randn(300, 300)
            for _ in range(40):
                end = end @ end / 1e4
            return quick(*args)

        monkeypatch.setattr(H, slow, slowed)
        H @ torch.ones(H.dim)
        assert H.route == wanted


def test_the_plan_of_the_risk_names_the_route():
    risk = cases.problem("mlp_mse").risk(plan=ritz.Plan(route="reverse"))
    assert ritz.Hessian(risk).route == "reverse"
    assert ritz.Hessian(risk, route="forward").route == "forward"


def test_a_block_keeps_the_route_of_the_whole():
    H = ritz.Hessian(cases.problem("mlp_mse").risk(), route="reverse")
    assert H.block("0.*").route == "reverse"


def test_nothing_is_warned_of_where_both_exact_routes_work():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H = ritz.Hessian(cases.problem("attention").risk())
        H @ torch.ones(H.dim)
    assert H.route == "forward"  # a forward pass that can be followed


@pytest.mark.parametrize("function", [Cube, OldCube])
def test_without_a_forward_derivative_auto_takes_reverse(function):
    risk, truth = net_risk(function.apply)
    H = ritz.Hessian(risk)
    assert cases.relative(H.dense(), cases.dense_hessian(truth)) < 1e-10
    assert H.route == "reverse"


@pytest.mark.parametrize("function", [OnceCube, OldOnceCube])
def test_without_any_second_derivative_auto_takes_differences_and_warns(function):
    risk, truth = net_risk(function.apply)
    H = ritz.Hessian(risk)
    with pytest.warns(NumericalWarning, match=f"no exact Hessian product.*{function.__name__}.*central differences"):
        dense = H.dense()
    assert H.route == "difference"
    assert cases.relative(dense, cases.dense_hessian(truth)) < 1e-6


def test_a_backward_that_silently_forgets_a_term_is_found_out():
    risk, truth = net_risk(DetachedCube.apply)
    wrong = ritz.Hessian(risk, route="reverse").dense()
    assert cases.relative(wrong, cases.dense_hessian(truth)) > 1e-2  # torch does not notice
    H = ritz.Hessian(risk)
    with pytest.warns(NumericalWarning, match="reverse products are wrong"):
        dense = H.dense()
    assert H.route == "difference"
    assert cases.relative(dense, cases.dense_hessian(truth)) < 1e-6


def test_a_term_is_missed_in_the_last_weights_too():
    """The first vectors of `dense` are those of the first weights, along which nothing is wrong."""

    class Branches(nn.Module):
        def __init__(self, cube):
            super().__init__()
            self.net, self.last, self.cube = cases.mlp([3, 4, 2]), nn.Linear(3, 2), cube

        def forward(self, x):
            return self.net(x) + self.cube(self.last(x))

    torch.manual_seed(0)
    wrong, right = Branches(DetachedCube.apply), Branches(plain_cube)
    right.load_state_dict(wrong.state_dict())
    batches = [(torch.randn(7, 3), torch.randn(7, 2))]
    H = ritz.Hessian(ritz.Risk(wrong, nn.MSELoss(), batches))
    with pytest.warns(NumericalWarning, match="reverse products are wrong"):
        dense = H.dense()
    assert H.route == "difference"
    assert cases.relative(dense, cases.dense_hessian(cases.Problem(right, nn.MSELoss(), batches))) < 1e-6


def test_of_exact_routes_that_disagree_the_symmetric_one_is_taken():
    risk, truth = net_risk(WrongForwardCube.apply)
    H = ritz.Hessian(risk)
    with pytest.warns(NumericalWarning, match="forward and reverse products disagree; reverse is the one.*symmetric"):
        dense = H.dense()
    assert H.route == "reverse"
    assert cases.relative(dense, cases.dense_hessian(truth)) < 1e-10


def test_a_forward_route_that_is_named_is_told_to_be_wrong_once_and_taken():
    risk, truth = net_risk(WrongForwardCube.apply)
    H = ritz.Hessian(risk, route="forward")
    with pytest.warns(NumericalWarning, match="forward and reverse products differ by .*; use route='auto'"):
        dense = H.dense()
    H.block("first.*").dense()  # has been told
    assert H.route == "forward"
    assert cases.relative(dense, cases.dense_hessian(truth)) > 1e-2


def test_a_forward_route_that_is_named_and_right_is_taken_in_silence():
    class RightCube(WrongForwardCube):
        @staticmethod
        def jvp(ctx, t):
            return 3 * ctx.saved_tensors[0] ** 2 * t

    risk, truth = net_risk(RightCube.apply)
    assert cases.relative(ritz.Hessian(risk, route="forward").dense(), cases.dense_hessian(truth)) < 1e-10


@pytest.mark.parametrize(("wrong", "right"), [("forward", "reverse"), ("reverse", "forward")])
def test_of_symmetric_routes_that_disagree_the_one_nearer_to_differences_is_taken(wrong, right, monkeypatch):
    problem = cases.problem("mlp_mse")
    H = ritz.Hessian(problem.risk())
    plain = getattr(H, f"_{wrong}")
    monkeypatch.setattr(H, f"_{wrong}", lambda *args: (1.01 * plain(*args)[0], plain(*args)[1]))
    with pytest.warns(NumericalWarning, match=f"products disagree; {right} is nearer to differences of the gradient"):
        dense = H.dense()
    assert H.route == right
    assert cases.relative(dense, cases.truth("mlp_mse", "Hessian")) < 1e-10


class Scaled(nn.Module):
    """Inner values divided by their largest, which is a constant by `detach`, or by the absence of gradients."""

    def __init__(self, detach):
        super().__init__()
        self.first, self.last, self.detach = nn.Linear(3, 4), nn.Linear(4, 2), detach

    def forward(self, x):
        with contextlib.nullcontext() if self.detach else torch.no_grad():
            largest = self.first(x).abs().amax(1, keepdim=True)
        return self.last((self.first(x) / (largest.detach() if self.detach else largest)).tanh())


def test_what_runs_without_gradients_is_a_constant_for_the_hessian():
    """Differences and forward mode look into torch.no_grad(), and what they see is not symmetric."""
    torch.manual_seed(0)
    hidden, plain = Scaled(detach=False), Scaled(detach=True)
    plain.load_state_dict(hidden.state_dict())
    batches = [(torch.randn(6, 3), torch.randint(0, 2, (6,)))]
    truth = cases.dense_hessian(cases.Problem(plain, nn.CrossEntropyLoss(), batches))
    H = ritz.Hessian(ritz.Risk(hidden, nn.CrossEntropyLoss(), batches))
    with pytest.warns(NumericalWarning, match="reverse is the one that is symmetric"):
        dense = H.dense()
    assert H.route == "reverse"
    assert cases.relative(dense, truth) < 1e-10


class Lopsided(torch.autograd.Function):
    """factor * a, whose backward forgets that the gradient in a depends on the factor."""

    @staticmethod
    def forward(ctx, factor, a):
        ctx.save_for_backward(factor, a)
        return factor * a

    @staticmethod
    def backward(ctx, g):
        factor, a = ctx.saved_tensors
        return (g * a).sum(), g * factor.detach()


class Faint(Lopsided):
    """The same with a gradient in the factor that is wrong as well."""

    @staticmethod
    def backward(ctx, g):
        in_factor, in_a = Lopsided.backward(ctx, g)
        return 0.5 * in_factor, in_a


class Factor(nn.Module):
    """A network whose outputs are multiplied with one more weight."""

    def __init__(self, function):
        super().__init__()
        self.net, self.factor, self.function = cases.mlp([3, 4, 2]), nn.Parameter(torch.tensor(2.0)), function

    def forward(self, x):
        return self.function.apply(self.factor, self.net(x))


@pytest.mark.parametrize(
    ("function", "route", "text"),
    [
        (Lopsided, "difference", "reverse products are wrong"),
        (Faint, "reverse", "reverse products are not symmetric, by .* not that of any function"),
    ],
)
def test_products_that_are_not_symmetric_are_left_where_differences_are_and_told_of_where_not(function, route, text):
    torch.manual_seed(0)
    H = ritz.Hessian(ritz.Risk(Factor(function), nn.MSELoss(), (torch.randn(7, 3), torch.randn(7, 2))))
    with pytest.warns(NumericalWarning, match=text):
        dense = H.dense()
    assert H.route == route
    assert (cases.relative(dense, dense.T) < 1e-6) == (route == "difference")


class Rounded(nn.Module):
    """A network that divides its features by their length, in float32 as transformers do."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(8, 16), nn.Linear(16, 5), dtype

    def forward(self, x):
        h = self.first(x).to(self.dtype)
        return self.last(F.silu(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype))


@pytest.mark.parametrize("seed", [1, 3])
def test_a_float64_risk_of_a_model_that_rounds_to_float32_keeps_its_exact_products(seed):
    """Differences in steps for float64 are far worse then: off by 3e-3 where either exact route is by 1e-7."""
    torch.manual_seed(seed)
    model, twin = Rounded(torch.float32), Rounded(torch.float64)
    twin.load_state_dict(model.state_dict())
    data = torch.randn(16, 8), torch.randint(5, (16,))
    H, truth = (ritz.Hessian(ritz.Risk(own, nn.CrossEntropyLoss(), data)) for own in (model, twin))
    product = H @ torch.ones(H.dim)  # without a word: warnings are errors here
    assert H.route != "difference"
    assert cases.relative(product, truth @ torch.ones(H.dim)) < 1e-6


def test_differences_of_a_model_that_rounds_to_float32_say_how_far_they_are_off():
    risk, _ = net_risk(lambda x: OnceCube.apply(x.float()).double())
    with pytest.warns(NumericalWarning, match=r"relative error of about [1-9]e-0[1-6] where"):
        ritz.Hessian(risk) @ torch.ones(risk.dim)


def test_a_kink_that_spoils_differences_does_not_discredit_the_only_exact_route():
    """A weight within the step of a kink of the loss: differences are far off, reverse mode is right."""
    risk, _ = net_risk(lambda x: OldCube.apply(x).relu())
    with torch.no_grad():
        risk.model.first.bias -= (risk.model.first(risk.batches.source[0][0][:1])).squeeze(0) - 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H = ritz.Hessian(risk)
        H @ H.probes([0], seed=0)[0]
    assert H.route == "reverse"


# --------------------------------------------------------------------------------- operations by their names


@pytest.mark.parametrize(("function", "route"), [(Cube, "forward"), (OldCube, "forward"), (OnceCube, "reverse")])
def test_an_operation_without_second_derivative_is_named(function, route):
    risk, _ = net_risk(function.apply)
    H = ritz.Hessian(risk, route=route)
    with pytest.raises(
        UnsupportedError, match=f"operation {function.__name__} has no second derivative by the {route}"
    ):
        H @ torch.ones(H.dim)


def test_an_operation_of_torch_is_named_too():
    def sampled(x):
        picture = torch.linspace(0, 1, 9).reshape(1, 1, 3, 3).expand(len(x), 1, 3, 3)
        return F.grid_sample(picture, x.tanh().reshape(-1, 1, 2, 2), align_corners=False).flatten(1).repeat(1, 2)

    risk, _ = net_risk(sampled)
    H = ritz.Hessian(risk, route="forward")
    with pytest.raises(UnsupportedError, match="operation grid_sampler_2d has no second derivative"):
        H @ torch.ones(H.dim)
    with contextlib.suppress(UnsupportedError):  # older torch has no second backward of it, and that is named too
        exact, rough = (ritz.Hessian(risk, route=route).dense() for route in ("reverse", "difference"))
        assert cases.relative(exact, rough) < 1e-6


@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_a_loss_of_torch_without_second_derivative_is_named_and_has_differences(route):
    """The backward of connectionist temporal classification has no derivative of its own."""
    targets = torch.tensor([[1, 2], [2, 1], [1, 1]])

    def ctc(model, batch):
        log_p = model(batch[0]).log_softmax(-1).transpose(0, 1)  # (time, batch, classes)
        count = len(batch[0])
        loss = F.ctc_loss(log_p, targets, (6,) * count, (2,) * count, reduction="sum")
        return loss, count

    x = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0))
    risk = ritz.Risk(cases.mlp([2, 4, 3]), data=[(x,)], batch_loss=ctc)
    H = ritz.Hessian(risk, route=route)
    with pytest.raises(UnsupportedError, match=r"operation .*ctc_loss.* has no second derivative"):
        H @ torch.ones(H.dim)
    auto = ritz.Hessian(risk)
    with pytest.warns(NumericalWarning, match="ctc_loss"):
        dense = auto.dense()
    assert auto.route == "difference"
    assert cases.relative(dense, dense.T) < 1e-6


def test_the_ggn_goes_without_forward_derivatives_and_names_what_has_neither():
    for function in (Cube, OldCube):
        risk, truth = net_risk(function.apply)
        assert cases.relative(ritz.GGN(risk).dense(), cases.dense_ggn(truth)) < 1e-10
        assert cases.relative(ritz.EmpiricalFisher(risk).dense(), cases.dense_empirical_fisher(truth)) < 1e-10
    risk, _ = net_risk(OnceCube.apply)
    with pytest.raises(UnsupportedError, match="operation OnceCube has neither a forward derivative nor a second one"):
        ritz.GGN(risk).dense()


def test_an_operation_that_takes_one_vector_at_a_time_is_given_one():
    """torch cannot batch RReLU; in evaluation mode it is a leaky ReLU with the mean of its slopes."""
    risk, truth = net_risk(nn.RReLU(0.1, 0.3))
    truth.model.operation = nn.LeakyReLU(0.2)
    for matrix in (ritz.GGN, ritz.EmpiricalFisher, ritz.Hessian):
        dense = cases.DENSE[matrix.__name__](truth)
        assert cases.relative(matrix(risk).dense(), dense) < 1e-10
    forward = ritz.Hessian(risk, route="forward")
    v = torch.ones(forward.dim)
    assert cases.relative(forward @ v, dense @ v) < 1e-10
    with pytest.raises(UnsupportedError, match="operation aten::rrelu_with_noise has no second derivative"):
        forward.dense()


@pytest.mark.parametrize("route", ["auto", "reverse", "difference"])
def test_activation_checkpointing_runs_straight_through(route):
    """It would recompute with the module's own weights, after the weights of the product are gone."""
    risk, truth = net_risk(plain_cube)
    risk.model.operation = lambda x: checkpoint(plain_cube, x, use_reentrant=False)
    assert cases.relative(ritz.Hessian(risk, route=route).dense(), cases.dense_hessian(truth)) < 1e-6
    assert cases.relative(ritz.GGN(risk).dense(), cases.dense_ggn(truth)) < 1e-10


@pytest.mark.parametrize("route", ["forward", "reverse", "difference"])
def test_an_error_of_the_model_itself_is_passed_on(route):
    risk, _ = net_risk(plain_cube)
    H = ritz.Hessian(risk, route=route)
    H @ torch.ones(H.dim)

    def broken(x):
        raise RuntimeError("the pump is off")

    risk.model.operation = broken
    with pytest.raises(RuntimeError, match="the pump is off"):
        H @ torch.ones(H.dim)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("derivative for aten::_ctc_loss_backward is not implemented", "aten::_ctc_loss_backward"),
        ("the derivative for '_cdist_backward' is not implemented.", "_cdist_backward"),
        ("Trying to use forward AD with logit_backward that does not support it because", "logit_backward"),
        ("You tried to vmap over Cube, but it does not have vmap support.", "Cube"),
        ("vmap: we do not yet support aten::rrelu_with_noise. Please file an issue", "aten::rrelu_with_noise"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_the_words_of_torch_are_understood(text, name):
    assert missing_operation(RuntimeError(text)) == name


# ------------------------------------------------------------------------------------- batching, attention


def test_where_second_derivatives_cannot_be_batched_they_are_taken_one_by_one():
    """torch's batching rule for the second derivative of group_norm is wrong."""
    H = ritz.Hessian(cases.problem("pixels").risk(), route="reverse")
    assert cases.relative(H.dense(), cases.truth("pixels", "Hessian")) < 1e-10
    assert not H._batched
    other = ritz.Hessian(cases.problem("mlp_mse").risk(), route="reverse")
    other @ torch.ones(other.dim)
    assert other._batched


def test_attention_runs_through_the_math_kernel_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, logger="ritz"):
        H = ritz.Hessian(cases.make("language").risk())
        H @ torch.ones(H.dim)
        H @ torch.ones(H.dim)
    assert "attention by the math kernel" in H.convention()
    assert sum("math kernel" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("activation", "low", "high"), [(nn.ReLU(), 0.4, 1e9), (nn.GELU(), 0.0, 1e-3)])
def test_differences_in_float32_are_for_smooth_networks(activation, low, high):
    """A step long enough for float32 crosses kinks, and a difference of gradients sees them; a derivative does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), activation, nn.Flatten(), nn.Linear(8 * 36, 10)).float()
    data = (torch.randn(200, 1, 8, 8, dtype=torch.float32), torch.randint(10, (200,)))
    rough = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), data), route="difference")
    exact = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), data, dtype=torch.float64))
    v = rough.probes([0], seed=0)[0]
    error = float(((rough @ v).double() - exact @ v.double()).norm() / (exact @ v.double()).norm())
    assert low <= error <= high


@pytest.mark.parametrize("broken", [None, "wrong", "missing"])
def test_reverse_mode_is_shared_by_others_only_where_it_gives_the_same(broken, monkeypatch):
    """Blocks take their products from the graph of one gradient, whichever route their matrix goes."""
    risk = cases.problem("mlp_mse").risk()
    H = ritz.Hessian(risk, route="forward")
    plain = H._reverse

    def reverse(*args):
        if broken == "missing":
            raise NotImplementedError("derivative for aten::none is not implemented")
        image, weight = plain(*args)
        return image * (2.0 if broken == "wrong" else 1.0), weight

    monkeypatch.setattr(H, "_reverse", reverse)
    with risk.session():
        given = risk.params(), next(iter(risk.batches)), H.probes([0], seed=0)
        assert H.reversible(*given) is (broken is None)
        assert ritz.Hessian(risk, route="reverse").reversible(*given)
        assert not ritz.Hessian(risk, route="difference").reversible(*given)


def test_a_cpu_without_memory_is_not_taken_for_a_missing_derivative(monkeypatch):
    """torch has no type of its own for it: fewer vectors are taken at once, and the route stays an exact one."""
    plain = ritz.Hessian._by

    def by(self, route, params, batch, rows):
        if len(rows) > 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
        return plain(self, route, params, batch, rows)

    monkeypatch.setattr(ritz.Hessian, "_by", by)
    H = ritz.Hessian(cases.problem("mlp_mse").risk())
    V = torch.randn(H.dim, 2)
    assert cases.relative(H @ V, cases.truth("mlp_mse", "Hessian") @ V) < 1e-11
    assert H.route in ("forward", "reverse")
    assert H._chunk == 1


# ------------------------------------------------------------------- fewer digits inside than the weights have


class Rough(nn.Module):
    """A norm in another precision than the weights', as in most language models."""

    def __init__(self, inside: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(4, 3), nn.Linear(3, 3), inside

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).to(self.inside)
        return self.last((h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype))


def test_routes_agree_to_the_digits_that_the_model_computes_with():
    torch.manual_seed(0)
    model, (x, y) = Rough(torch.float32), (torch.randn(6, 4), torch.randint(3, (6,)))
    H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (x, y)))
    V = torch.randn(H.dim, 3)
    found = H @ V  # a warning is an error
    assert H.route == "forward"
    assert H.risk.coarsest == torch.float32
    model.inside = torch.float64
    exact = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (x, y)))
    assert cases.relative(found, exact @ V) < 1e-5
    assert exact.risk.coarsest == torch.float64


def test_differences_step_over_the_rounding_inside_the_model():
    torch.manual_seed(0)
    model, (x, y) = Rough(torch.float32), (torch.randn(6, 4), torch.randint(3, (6,)))
    differences = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (x, y)), route="difference")
    v = torch.randn(differences.dim)
    found = differences @ v
    model.inside = torch.float64
    assert (
        cases.relative(found, ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (x, y))) @ v) < 1e-3
    )  # 4e-3 by the step of float64
