"""How much work is done, by count: what a change of the code may not make dearer without being seen.

The network is 20-16-5 without biases on N = 12 samples, so that every matrix product is known: a layer (n, m) takes
N n m multiplications forward, as many for the gradient of its weight and as many for that of its input. Forward mode by
torch.func, which a single Gauss-Newton product takes, gives the images a tangent of zeros and multiplies with it: that
is its bound from above.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from work import counted

import ritz
from ritz import compilation
from ritz.krylov.lanczos import extend, start
from ritz.models import vgg16_bn
from ritz.operators import FunctionOperator, risk_operator

N, IN, MID, OUT = 12, 20, 16, 5
FIRST, LAST = N * IN * MID, N * MID * OUT  # multiplications of the layers
FORWARD = FIRST + LAST
GRADIENT = 2 * FIRST + 3 * LAST  # the images need no gradient
DIM = IN * MID + MID * OUT


def risk_of(batches: int = 1, activation: type[nn.Module] = nn.Tanh, **plan: object) -> ritz.Risk:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, MID, bias=False), activation(), nn.Linear(MID, OUT, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) / 4)
    X, y = torch.randn(N * batches, IN, generator=draw), torch.randint(OUT, (N * batches,), generator=draw)
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), batch_size=N, plan=ritz.Plan(**plan))


def conv_risk_of(**plan: object) -> ritz.Risk:
    """A convolution of 2 x 6 x 6 images to 3 x 4 x 4 and a dense layer to 5."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(48, OUT, bias=False))
    X, y = torch.randn(N, 2, 6, 6), torch.randint(OUT, (N,))
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), plan=ritz.Plan(**plan))


def ready(operator: ritz.Operator, k: int) -> torch.Tensor:
    """Rows, after a first product: checks are made once."""
    rows = operator.probes(range(k), seed=0)
    operator.rows(rows)
    return rows


def test_the_gradient_is_the_yardstick(monkeypatch):
    risk = risk_of()
    risk.check()
    with counted(monkeypatch) as work:
        risk.gradient()
    assert (work.multiplications, work.forwards) == (GRADIENT, 1)


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_hessian_products_share_one_gradient(monkeypatch, route, k):
    """K products are 1 gradient and K times its derivative: 2 of each product, where nothing is constant.

    Along a tape the gradient is that in the values, not in the weights.
    """
    H = ritz.Hessian(risk_of(route=route, cache=False))
    rows = ready(H, k)
    with counted(monkeypatch) as work:
        H.rows(rows)
    shared = FORWARD + LAST if route == "forward" else GRADIENT
    assert work.multiplications == shared + k * (2 * FIRST + 6 * LAST)
    assert (work.forwards, work.batch_products, work.vectors, work.looks) == (1, 1, k, 0)


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("route", ["forward", "reverse"])
def test_hessian_products_of_a_convolution_are_as_many(monkeypatch, route, k):
    first, last = N * 48 * 18, N * 48 * OUT
    H = ritz.Hessian(conv_risk_of(route=route, cache=False))
    rows = ready(H, k)
    with counted(monkeypatch) as work:
        H.rows(rows)
    shared = first + 2 * last if route == "forward" else 2 * first + 3 * last
    images = k * first if route == "reverse" and k > 1 else 0  # whose gradient torch's batching takes, unasked
    assert work.multiplications == shared + k * (2 * first + 6 * last) + images


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("matrix", [ritz.GGN, ritz.EmpiricalFisher])
def test_gauss_newton_products_share_one_forward_pass(monkeypatch, matrix, k):
    """One forward pass, and for each vector its tangent (the input has none) and one backward pass."""
    G = matrix(risk_of(cache=False))
    rows = ready(G, k)
    with counted(monkeypatch) as work:
        G.rows(rows)
    least = FORWARD + k * ((FIRST + 2 * LAST) + (FIRST + 2 * LAST))
    assert least <= work.multiplications <= least + (FIRST if k == 1 else 0)
    assert (work.forwards, work.batch_products, work.vectors, work.looks) == (1, 1, k, 0)


def test_forward_mode_is_held_against_reverse_mode_once_for_a_risk_whatever_the_vectors(monkeypatch):
    risk = risk_of(cache=False)
    unit = torch.eye(DIM)[:1]
    ritz.GGN(risk).rows(unit)
    for G in (ritz.GGN(risk), ritz.EmpiricalFisher(risk)):
        with counted(monkeypatch) as work:
            G.rows(unit)
        assert (work.forwards, work.looks) == (1, 0)


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize(("matrix", "each"), [(ritz.Hessian, 2 * FIRST + 6 * LAST), (ritz.GGN, 2 * FIRST + 4 * LAST)])
def test_a_batch_that_is_kept_is_not_passed_through_again(monkeypatch, matrix, each, k):
    A = matrix(risk_of(batches=3))
    rows = ready(A, k)
    with counted(monkeypatch) as work:
        A.rows(rows)
    assert (work.multiplications, work.forwards) == (3 * k * each, 0)


@pytest.mark.parametrize("matrix", [ritz.Hessian, ritz.GGN])
def test_batches_and_chunks_add_up(monkeypatch, matrix):
    A = matrix(risk_of(batches=3, chunk=4, route="reverse", cache=False))
    rows = ready(A, 10)
    with counted(monkeypatch) as work:
        A.rows(rows)
    assert (work.forwards, work.batch_products, work.vectors, work.looks) == (9, 9, 30, 0)


def test_a_product_with_columns_is_looked_at_once(monkeypatch):
    """Whether it is finite."""
    H = ritz.Hessian(risk_of(route="reverse"))
    V = ready(H, 8).T
    with counted(monkeypatch) as work:
        H @ V
    assert work.looks == 1


@pytest.mark.parametrize("cache", [None, False])
@pytest.mark.parametrize("matrix", [ritz.Hessian, ritz.GGN])
def test_vectors_are_held_once_and_activations_a_few_times(monkeypatch, matrix, cache):
    """The images, in which gradients are gathered. The rest is activations and their tangents."""
    k = 8
    A = matrix(risk_of(route="forward", cache=cache))
    rows = ready(A, k)
    with counted(monkeypatch, memory=True) as work:
        A.rows(rows)
    vectors, activations = 8 * k * DIM, 8 * (k + 1) * N * (MID + OUT)
    assert work.peak <= 1.05 * vectors + 5 * activations


@pytest.mark.parametrize("matrix", [ritz.Hessian, ritz.GGN])
def test_gradients_of_kernels_are_gathered_one_vector_after_another(monkeypatch, matrix):
    """Of wide kernels on small images the gradients are most of the memory: those of all vectors lie in the images."""
    k, kernel = 8, 8 * 9 * 32 * 32
    wide = nn.Sequential(nn.Conv2d(1, 32, 1), nn.Tanh(), nn.Conv2d(32, 32, 3, padding=1), nn.AvgPool2d(2), nn.Flatten())
    data = torch.randn(1, 1, 2, 2), torch.zeros(1, 32)
    A = matrix(ritz.Risk(wide, nn.MSELoss(), data, plan=ritz.Plan(route="forward")))
    rows = ready(A, k)
    with counted(monkeypatch, memory=True) as work:
        A.rows(rows)
    assert work.peak <= k * kernel + 3 * kernel


def test_a_large_activation_is_cut_into_pieces(monkeypatch):
    """On a CPU the tangents of one activation take 16 MiB at most."""
    wide = nn.Sequential(nn.Linear(1, 1 << 13, bias=False), nn.ReLU(), nn.Linear(1 << 13, 1, bias=False))
    data = torch.ones(128, 1), torch.ones(128, 1)
    risk = ritz.Risk(wide, nn.MSELoss(), data, plan=ritz.Plan(route="reverse", cache=False))
    G = ritz.GGN(risk)
    rows = ready(G, 8)
    with counted(monkeypatch, memory=True) as work:
        G.rows(rows)
    assert (work.forwards, work.batch_products) == (4, 4)  # 8 vectors, 8 bytes, 2^13 units: 32 samples at a time
    assert work.peak <= 5 * (1 << 24)


def test_the_first_product_checks_and_chooses_at_a_known_price(monkeypatch):
    """Four passes of checks on the first batch, one on the others; each exact route three times on the first batch."""
    H = ritz.Hessian(risk_of(batches=3))
    with counted(monkeypatch) as work:
        H.rows(H.probes(range(2), seed=0))
    assert work.forwards <= 6 + 2 + 6 + 3 + 2
    assert work.batch_products == 3


def test_a_spectrum_makes_the_products_it_says_and_no_other_pass(monkeypatch):
    H = ritz.Hessian(risk_of(batches=2, route="reverse"))
    ready(H, 1)
    with counted(monkeypatch) as work:
        found = ritz.spectrum(H, num_steps=10, num_probes=8)
    assert work.vectors == 2 * found.products
    assert work.forwards == work.batch_products <= 2 * (found.products // 8 + 6)
    assert work.looks <= 30  # 21 when this was written, of 179 products


@pytest.mark.parametrize("num_locked", [0, 16])
def test_a_step_of_the_tail_passes_over_its_rows_so_often_and_asks_nothing_of_the_device(monkeypatch, num_locked):
    """K rows of P numbers 24 times, and for each of 3 projections 3 times more and the locked rows twice.

    At P = 15 million, K = 8 and 32 locked rows in float32 that is 27 GB a step.
    """
    k, dim = 8, 20_000
    factors = torch.linspace(-1.0, 1.0, dim)[:, None]
    A = FunctionOperator(lambda V: V * factors, dim, dtype=torch.float64)
    locked = torch.eye(dim)[:num_locked] if num_locked else None
    state = extend(A, start(A.probes(range(k), seed=0), locked=locked), 2)
    with counted(monkeypatch) as work:
        A.rows(state.rows)
    own = work.moved
    with counted(monkeypatch) as work:
        extend(A, state, 1)
    passes = 24 * k + (3 * (3 * k + 2 * num_locked) if num_locked else 0)
    assert work.looks == 0
    assert 0.9 * passes <= (work.moved - own) / (8 * dim) <= 1.05 * passes


def test_the_standard_measures_cost_their_spectrum_and_some_passes(monkeypatch):
    init = {name: torch.zeros_like(p) for name, p in risk_of().model.named_parameters()}
    with counted(monkeypatch) as alone:
        ritz.spectrum(ritz.Hessian(risk_of(batches=2, route="reverse")), num_steps=10)
    with counted(monkeypatch) as work:
        ritz.measure(risk_of(batches=2, route="reverse"), init=init, num_steps=10)
    assert work.vectors <= alone.vectors
    assert work.multiplications <= 1.2 * alone.multiplications


def test_sample_traces_are_one_forward_pass_and_one_backward_pass_for_each_class(monkeypatch):
    risk = risk_of(batches=2, activation=nn.ReLU)
    ritz.sample_traces(risk)
    with counted(monkeypatch) as work:
        found = ritz.sample_traces(risk)
    assert found.exact
    assert work.batch_products == 0
    assert work.forwards <= 2 + 3  # and some that look whether it is exact
    assert work.multiplications <= 2 * (FORWARD + OUT * (FIRST + 2 * LAST)) * 1.2


def test_the_host_does_little_for_a_product_that_is_prepared(monkeypatch):
    """Calls from Python for one product of a network with 97 tensors, what is compiled aside; they were 8,400 once.

    A device waits for them before its first kernel.
    """

    def lowered(graph: torch.fx.GraphModule) -> Callable[..., object]:
        results: list[object] = []
        return lambda *inputs: results[0] if results else results.append(graph(*inputs)) or results[0]

    monkeypatch.setattr(compilation, "lowered", lowered)
    monkeypatch.setattr(risk_operator, "KEPT_ON", ("cpu",))
    model, data = vgg16_bn(width=1 / 32).eval(), (torch.randn(4, 3, 32, 32), torch.arange(4))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(compile=True, replay=True))
    H, calls = ritz.Hessian(risk), []
    row = torch.ones(1, H.dim)
    for _ in range(4):
        H.rows(row)
    assert (len(risk.state()), len(risk.shortcuts.held), len(risk.shortcuts.recordings)) == (97, 1, 1)
    sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
    try:
        H.rows(row)
    finally:
        sys.setprofile(None)
    assert len(calls) < 4000
