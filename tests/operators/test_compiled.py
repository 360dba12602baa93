"""Products that are compiled, replayed, batched or cut into pieces are the products: float64, against dense truth."""

import itertools
import logging

import cases
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import ritz
from ritz import compilation
from ritz.operators import footprint, risk_operator
from ritz.operators.tape import layers
from ritz.switches import tensor_cores

MATRICES = {"Hessian": ritz.Hessian, "GGN": ritz.GGN, "EmpiricalFisher": ritz.EmpiricalFisher}
SAME = 1e-10  # relative, of a whole image


@pytest.fixture
def lowered(monkeypatch):
    """What is compiled; here a graph is run as it was traced."""
    made: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compilation, "lowered", lambda graph: made.append(graph) or graph)
    return made


def columns(dim: int, k: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(dim, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "matrix"),
    [*((name, "Hessian") for name in cases.NAMES), *((name, "GGN") for name in ("mlp_bce", "pixels", "language"))],
)
def test_traced_products_are_right_on_every_network(lowered, name, matrix):
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse"))
    A, V = MATRICES[matrix](risk), columns(risk.dim)
    wanted = cases.truth(name, matrix) @ V
    for _ in range(2):
        assert cases.relative(A @ V, wanted) < SAME
    assert len(lowered) == len(risk.shortcuts.compilations) == 1  # the ragged batches are taken as they are


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", ["conv", "residual", "residual_train", "pixels"])
def test_products_are_traced_as_for_a_gpu_with_channels_last_and_side_by_side(lowered, monkeypatch, name, matrix):
    monkeypatch.setattr(risk_operator, "CHANNELS_LAST_ON", ("cpu",))
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",))
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse"))
    A, V = MATRICES[matrix](risk), columns(risk.dim)
    for _ in range(2):
        assert cases.relative(A @ V, cases.truth(name, matrix) @ V) < SAME
    assert A._last
    assert len(lowered) == 1


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("matrix", MATRICES)
def test_whatever_is_convolved_has_its_channels_last(lowered, monkeypatch, matrix, k):
    """Else torch turns it around before each convolution, by a kernel that is far slower than a compiled one."""
    monkeypatch.setattr(risk_operator, "CHANNELS_LAST_ON", ("cpu",))
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",))
    torch.manual_seed(0)
    blocks = [
        [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()] for a, b in ((3, 4), (4, 4), (4, 5), (5, 6))
    ]
    model = nn.Sequential(*blocks[0], *blocks[1], nn.MaxPool2d(2), *blocks[2], *blocks[3], nn.Flatten())
    model.append(nn.Linear(6 * 16, 3))
    data = torch.randn(5, 3, 8, 8), torch.arange(5) % 3
    A = MATRICES[matrix](ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(compile=True, route="reverse")))
    A @ columns(A.dim, k)
    convolutions = [node for node in lowered[0].graph.nodes if "convolution" in str(node.target)]
    strides = [
        given.meta["tensor_meta"].stride
        for node in convolutions
        for given in node.args[: 3 if "backward" in str(node.target) else 2]
    ]
    assert len(convolutions) > 4
    assert [stride for stride in strides if len(stride) == 4 and stride[1] != 1] == []


@pytest.mark.parametrize("folds", [True, False])
def test_where_vectors_are_convolved_side_by_side_three_take_as_many_convolutions_as_one(lowered, monkeypatch, folds):
    monkeypatch.setattr(layers, "FOLDS_ON", ("cpu",) if folds else ())
    counts = []
    for k in (1, 3):
        H = ritz.Hessian(cases.problem("residual").risk(plan=ritz.Plan(compile=True, route="reverse")))
        for _ in range(2):
            H @ columns(H.dim, k)
        counts.append(sum("convolution" in str(node.target) for node in lowered[-1].graph.nodes))
    assert (counts[0] == counts[1]) is folds


def test_a_model_that_views_across_channels_is_traced_as_it_is(lowered, monkeypatch):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 2, 1), nn.Linear(32, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).tanh().flatten(1)) + x.view(len(x), -1)[:, :1]

    monkeypatch.setattr(risk_operator, "CHANNELS_LAST_ON", ("cpu",))
    torch.manual_seed(0)
    data = torch.randn(5, 2, 4, 4), torch.randint(3, (5,))
    model = Views()
    A, plain = (
        ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=ritz.Plan(compile=choice)))
        for choice in (True, False)
    )
    V = columns(A.dim)
    for _ in range(2):
        assert cases.relative(A @ V, plain @ V) < SAME
    assert A._last is False
    assert len(lowered) == 1


@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
@pytest.mark.parametrize("name", ["mlp_mse", "conv", "attention", "language"])
def test_nothing_that_is_compiled_is_multiplied_with_zero(lowered, name, matrix):
    """Compilers for a GPU take addmm(x, a, b, beta=0) as 0 x + a b, where x is memory that nobody wrote."""
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse"))
    A = MATRICES[matrix](risk)
    for _ in range(2):
        A @ columns(A.dim)
    assert all(node.kwargs.get("beta", 1) != 0 for node in lowered[0].graph.nodes)


def test_what_is_compiled_goes_along_the_tape(lowered):
    """One forward pass for all vectors: as many matrix products for three as for one, but those of weights."""
    counts = {}
    for k in (1, 3):
        risk = cases.problem("mlp_mse").risk(plan=ritz.Plan(compile=True, route="reverse"))
        H = ritz.Hessian(risk)
        for _ in range(2):
            H @ columns(H.dim, k)
        counts[k] = sum("mm" in str(node.target) for node in lowered[-1].graph.nodes)
    assert counts[1] == counts[3]


def test_where_precision_is_short_one_vector_is_held_against_float64(monkeypatch):
    """A compiled product that is off by as much as the product itself is used; its check is that of a single vector."""
    monkeypatch.setitem(compilation.AGREE, torch.float32, -1.0)  # even one that is equal
    seen = []
    plain = ritz.GGN._traced

    def traced(self, params, held, batch, rows):
        seen.append((len(rows), rows.dtype))
        return plain(self, params, held, batch, rows)

    monkeypatch.setattr(ritz.GGN, "_traced", traced)
    monkeypatch.setattr(compilation, "lowered", lambda graph: graph)
    risk = cases.problem("mlp_mse").risk(dtype=torch.float32, plan=ritz.Plan(compile=True))
    G, V = ritz.GGN(risk), columns(risk.dim)
    for _ in range(2):
        assert cases.relative((G @ V).double(), cases.truth("mlp_mse", "GGN") @ V) < 1e-5
    assert seen == [(3, torch.float32), (1, torch.float64)]
    assert len(risk.shortcuts.compilations) == 1


def test_a_recording_of_the_product_as_it_is_gives_way_to_the_compiled_one(lowered, monkeypatch):
    monkeypatch.setattr(compilation, "AUTO_ON", ("cpu",))
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    ticks = itertools.count()
    monkeypatch.setattr(compilation, "clock", lambda device: next(ticks) / 1024)
    problem = cases.problem("mlp_mse")
    risk = problem.risk(problem.batches[:1], plan=ritz.Plan(replay=True))
    G, V = ritz.GGN(risk), columns(risk.dim)
    for _ in range(3):
        G @ V
    assert (len(risk.shortcuts.recordings), len(lowered)) == (1, 0)
    G.expect(10**9)
    for _ in range(6):
        assert cases.relative(G @ V, ritz.GGN(problem.risk(problem.batches[:1])) @ V) < SAME
    assert (len(risk.shortcuts.recordings), len(lowered)) == (1, 1)


@pytest.mark.parametrize("waits", [True, False])
def test_a_compiled_product_is_recorded_where_the_device_would_wait_for_the_host(lowered, monkeypatch, waits):
    monkeypatch.setattr(compilation, "WAITS", -1.0 if waits else 2.0)
    risk = cases.problem("conv").risk(plan=ritz.Plan(compile=True, replay=True, route="reverse"), batch_size=None)
    H, V = ritz.Hessian(risk), columns(risk.dim)
    for _ in range(4):
        assert cases.relative(H @ V, cases.truth("conv", "Hessian") @ V) < SAME
    recorded = {key[0][0] for key, made in risk.shortcuts.recordings._kept.items() if made is not None}
    assert any(isinstance(recipe, tuple) and "compiled" in recipe for recipe in recorded) is waits


def test_products_at_the_side_of_a_run_are_taken_as_they_are(lowered):
    risk = cases.problem("conv").risk(plan=ritz.Plan(compile=True, replay=True, route="reverse"))
    H, V = ritz.Hessian(risk), columns(risk.dim)
    both = 2 * H + (H + 1.0)
    with both.aside():
        for _ in range(3):
            assert cases.relative(both @ V, 3 * cases.truth("conv", "Hessian") @ V + V) < SAME
    assert not lowered
    assert not len(risk.shortcuts.recordings)
    for _ in range(3):
        H @ V
    assert len(lowered) == 1
    assert len(risk.shortcuts.recordings)


def test_a_spectrum_compiles_for_as_many_vectors_as_it_takes_at_a_time(lowered):
    risk = cases.problem("conv").risk(plan=ritz.Plan(compile=True, route="reverse"))
    ritz.spectrum(ritz.Hessian(risk), num_steps=3, num_probes=8, reorthogonalize="none")  # three at its side
    assert len(lowered) == 1


def test_a_matrix_that_cannot_be_compiled_is_run_as_it_is(lowered):
    class Own(ritz.GGN):
        _traced = ritz.operators.risk_operator.RiskOperator._traced

    risk = cases.problem("mlp_bce").risk(plan=ritz.Plan(compile=True))
    V = columns(risk.dim)
    for _ in range(2):
        assert cases.relative(Own(risk) @ V, cases.truth("mlp_bce", "GGN") @ V) < SAME
    assert lowered == []


REPLAYED, CUT = {"replay": True}, {"chunk": 2, "micro_batch": 2}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, REPLAYED) for name in cases.NAMES),
        *((name, CUT) for name in cases.NAMES if cases.problem(name).mode == "eval"),  # other batches stay whole
    ],
)
def test_replayed_chunked_and_cut_products_are_right_on_every_network(name, plan):
    problem = cases.problem(name)
    risk = problem.risk(plan=ritz.Plan(compile=False, route="reverse", **plan))
    for matrix in ("Hessian", "GGN"):
        A, V = MATRICES[matrix](risk), columns(risk.dim)
        for _ in range(3):
            image = A @ V
        assert cases.relative(image, cases.truth(name, matrix) @ V) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", cases.NAMES)
def test_products_through_torch_compile_are_right_on_every_network(monkeypatch, name, matrix):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse"))
    A, V = MATRICES[matrix](risk), columns(risk.dim)
    for _ in range(2):
        assert cases.relative(A @ V, cases.truth(name, matrix) @ V) < SAME
    assert len(risk.shortcuts.compilations) == 1


def test_through_torch_compile_a_product_is_right_and_compiled_once(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    seen, plain = [], compilation.lowered
    monkeypatch.setattr(compilation, "lowered", lambda graph: seen.append(graph) or plain(graph))
    risk = cases.make("mlp_mse").risk(plan=ritz.Plan(compile=True))
    H, V = ritz.Hessian(risk), columns(risk.dim)
    before = torch.get_rng_state()
    for _ in range(3):
        assert cases.relative(H @ V, cases.truth("mlp_mse", "Hessian") @ V) < SAME
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        for p in risk.model.parameters():
            p.mul_(0.5)  # the weights are read as they are now
    moved = ritz.Hessian(ritz.Risk(risk.model, nn.MSELoss(), cases.problem("mlp_mse").batches))
    assert cases.relative(H @ V, moved @ V) < SAME
    assert len(seen) == 1


@pytest.mark.parametrize("matrix", ["Hessian", "EmpiricalFisher"])
def test_a_compiled_product_follows_weights_buffers_and_other_points(lowered, matrix):
    problem = cases.make("residual")
    plan = ritz.Plan(compile=True, route="reverse")
    risk, plain = problem.risk(plan=plan), problem.risk(plan=ritz.Plan(compile=False, route="reverse"))
    A, B, V = MATRICES[matrix](risk), MATRICES[matrix](plain), columns(risk.dim)
    for _ in range(3):
        assert cases.relative(A @ V, B @ V) < SAME
        with torch.no_grad():
            problem.model.stem.weight.mul_(1.1)
            problem.model.norm.running_mean += 0.1
    other = {name: 2 * p for name, p in risk.params().items()}
    assert cases.relative(MATRICES[matrix](risk.at(other)) @ V, MATRICES[matrix](plain.at(other)) @ V) < SAME
    assert len(lowered) == 1


def test_a_change_of_a_module_or_of_the_parameters_is_another_function(lowered):
    problem = cases.make("residual")
    risk = problem.risk(plan=ritz.Plan(compile=True))
    G = ritz.GGN(risk)
    G @ columns(risk.dim)
    problem.model.norm.eps = 1.0
    plain = ritz.GGN(problem.risk(plan=ritz.Plan(compile=False)))
    assert cases.relative(G @ columns(risk.dim), plain @ columns(risk.dim)) < SAME
    part, same = G.block("head.*"), plain.block("head.*")
    assert cases.relative(part @ columns(part.dim), same @ columns(part.dim)) < SAME
    assert len(lowered) == 3


def test_a_compiled_product_is_the_same_each_time_and_leaves_no_trace(lowered):
    problem = cases.make("attention")
    state = {name: t.clone() for name, t in problem.model.state_dict().items()}
    risk = problem.risk(plan=ritz.Plan(compile=True))
    H, V = ritz.Hessian(risk), columns(risk.dim)
    H @ V
    first, before = H @ V, V.clone()
    assert torch.equal(H @ V, first)
    assert torch.equal(V, before)
    assert all(torch.equal(t, state[name]) for name, t in problem.model.state_dict().items())
    assert all(p.grad is None for p in problem.model.parameters())


def test_auto_compiles_a_long_run_of_a_known_model_and_no_other(lowered, monkeypatch):
    monkeypatch.setattr(compilation, "AUTO_ON", ("cpu",))
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    ticks = itertools.count()
    monkeypatch.setattr(compilation, "clock", lambda device: next(ticks) / 1024)
    for name, wanted in (("mlp_mse", 1), ("mlp_custom", 0), ("residual", 0)):  # a loss and a module of the user's
        for expected in (0, 10**9):
            lowered.clear()
            G = ritz.GGN(cases.problem(name).risk())
            G.expect(expected)
            for _ in range(4):
                G @ columns(G.dim)
            assert len(lowered) == (wanted if expected else 0)


@pytest.mark.parametrize("matrix", [ritz.GGN, ritz.Hessian])
def test_a_vector_that_lies_apart_in_memory_is_no_new_function(matrix, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    risk = cases.problem("mlp_mse").risk(plan=ritz.Plan(compile=True, route="reverse"))
    A = matrix(risk)
    V = columns(A.dim, 7)
    wide = torch.zeros(1, A.dim + 5).copy_(torch.cat([V[:, 0], torch.ones(5)])[None])
    A @ V[:, 0].contiguous()
    before = counters["stats"]["unique_graphs"]
    for v in (V[:, 0], V[:, :3][:, 0], V.T.contiguous()[0], wide[0, : A.dim]):
        assert cases.relative(A @ v, cases.truth("mlp_mse", A.matrix) @ v) < SAME
    assert cases.relative(A.rows(wide[:, : A.dim])[0], cases.truth("mlp_mse", A.matrix) @ V[:, 0]) < SAME
    assert counters["stats"]["unique_graphs"] == before


def test_auto_does_not_go_by_the_calls_in_which_it_is_recorded(lowered, monkeypatch):
    now = 0.0
    monkeypatch.setattr(compilation, "AUTO_ON", ("cpu",))
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    monkeypatch.setattr(compilation, "clock", lambda device: now)
    store, x = compilation.Compilations(), torch.ones(3)

    def slow(seconds):
        nonlocal now
        now += seconds
        return (2 * x,)

    for seconds in (9.0, 9.0, 0.01, 0.02):  # choosing algorithms, recording, and two as all that are to come
        store.find("double", lambda s=seconds: slow(s), lambda x: (2 * x,), [x], compilation.Prospect(calls_left=1000))
    assert not lowered
    assert store._known["double"].seconds == pytest.approx(0.01)


def test_auto_goes_by_what_is_expected(lowered, monkeypatch):
    monkeypatch.setattr(compilation, "AUTO_ON", ("cpu",))
    G = ritz.GGN(cases.problem("mlp_mse").risk())
    G @ columns(G.dim)
    assert not G._considers_compiling()
    G.expect(10**9)
    assert G._considers_compiling()
    G @ columns(G.dim)
    assert G._expected == 10**9 - 3
    with pytest.raises(ValueError, match="products must not be negative, got -1"):
        G.expect(-1)


def test_on_a_cpu_auto_does_not_compile(lowered):
    G = ritz.GGN(cases.problem("mlp_mse").risk())
    G.expect(10**9)
    for _ in range(4):
        G @ columns(G.dim)
    assert not lowered


def test_dropout_and_drawn_labels_are_not_compiled(lowered):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3))
    data = torch.randn(6, 4), torch.randint(3, (6,))
    plan = ritz.Plan(compile=True)
    for operator in (
        ritz.GGN(ritz.Risk(model, nn.CrossEntropyLoss(), data, dropout=True, plan=plan)),
        ritz.Fisher(ritz.Risk(model, nn.CrossEntropyLoss(), data, plan=plan)),
    ):
        for _ in range(2):
            operator @ columns(operator.dim)
    assert not lowered


def test_a_wrong_compiler_changes_nothing_but_the_log(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "lowered", lambda graph: lambda *x: tuple(2 * y for y in graph(*x)))
    risk = cases.problem("mlp_mse").risk(plan=ritz.Plan(compile=True))
    H, V = ritz.Hessian(risk), columns(risk.dim)
    with caplog.at_level(logging.INFO, "ritz"):
        for _ in range(3):
            assert cases.relative(H @ V, cases.truth("mlp_mse", "Hessian") @ V) < SAME
    assert "compiled, it is 1.0e+00 off" in caplog.text


@pytest.mark.parametrize("given", ["yes", None, 1.5])
def test_a_plan_refuses_another_word(given):
    with pytest.raises(ValueError, match=f"compile must be True, False or 'auto', got {given!r}"):
        ritz.Plan(compile=given)


# ---------------------------------------------------------------------------------------- pieces on a CPU


@pytest.mark.parametrize("name", ["mlp_relu", "conv", "pixels", "attention", "language", "residual"])
def test_pieces_of_a_batch_give_the_product_of_the_batch(monkeypatch, name):
    risk = cases.problem(name).risk()
    H, G, V = ritz.Hessian(risk, "reverse"), ritz.GGN(risk), columns(risk.dim)
    seen, plain = set(), ritz.GGN._product
    monkeypatch.setattr(footprint, "LARGEST", 1)
    monkeypatch.setattr(footprint, "WORTH", 0)
    monkeypatch.setattr(
        ritz.GGN, "_product", lambda self, p, batch, r: seen.add(batch.size) or plain(self, p, batch, r)
    )
    assert cases.relative(G @ V, cases.truth(name, "GGN") @ V) < SAME
    assert cases.relative(H @ V, cases.truth(name, "Hessian") @ V) < SAME
    assert seen <= {1, 2}  # a batch of two is not looked at


def test_a_batch_that_may_not_be_cut_is_not(monkeypatch):
    monkeypatch.setattr(footprint, "LARGEST", 1)
    monkeypatch.setattr(footprint, "fitting_piece", None)
    for keywords in ({"mode": "train"}, {"plan": ritz.Plan(micro_batch=3)}):
        risk = cases.problem("residual").risk(**keywords)
        truth = cases.truth("residual_train" if "mode" in keywords else "residual", "GGN")
        assert cases.relative(ritz.GGN(risk) @ columns(risk.dim), truth @ columns(risk.dim)) < SAME


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "matrix"), [("conv", "Hessian"), ("residual", "GGN"), ("attention", "Hessian")])
def test_on_a_gpu_compiled_products_are_right_in_float64_and_as_near_as_others_in_tf32(name, matrix):
    problem = cases.make(name)
    problem.model.cuda()
    data = [tuple(x.cuda() for x in batch) for batch in problem.batches]
    V = columns(cases.truth(name, matrix).shape[0], k=1)
    wanted = cases.truth(name, matrix) @ V
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 3e-2)):
        risk = problem.risk(data, dtype=dtype, plan=ritz.Plan(compile=True))
        A = MATRICES[matrix](risk)
        for _ in range(5):  # compiled, recorded, replayed
            assert cases.relative((A @ V.cuda()).cpu().double(), wanted) < most
        assert len(risk.shortcuts.compilations) == 1
        assert len(risk.shortcuts.held) > 0


@pytest.mark.gpu
def test_on_a_gpu_what_is_kept_and_recorded_goes_with_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).cuda()
    X, Y = torch.randn(8, 2, 6, 6, device="cuda"), torch.arange(8, device="cuda") % 3
    H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, Y), plan=ritz.Plan(compile=True)))
    V = columns(H.dim, k=1).cuda()
    for _ in range(3):
        for _ in range(4):
            torch.testing.assert_close(H @ V, whole(model, X, Y) @ V)
        model[0].weight.data.mul_(1.5)  # which torch does not count
    assert len(H.risk.shortcuts.compilations) == len(H.risk.shortcuts.recordings) == len(H.risk.shortcuts.held) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
@pytest.mark.parametrize("name", cases.NAMES)
def test_recorded_products_are_right_on_every_network_in_float64_and_with_tensor_cores(name, matrix, device):
    problem = cases.make(name)
    problem.model.to(device)
    if isinstance(problem.loss, nn.Module):
        problem.loss.to(device)
    data = [tuple(x.to(device) for x in batch) for batch in problem.batches]
    V = columns(cases.truth(name, matrix).shape[0])
    wanted = cases.truth(name, matrix) @ V
    for dtype, most in ((torch.float64, 1e-9), (torch.float32, 3e-2)):
        A = MATRICES[matrix](problem.risk(data, dtype=dtype, plan=ritz.Plan(replay=True)))
        with tensor_cores():
            for _ in range(3):
                assert cases.relative((A @ V.to(device)).cpu().double(), wanted) < most
        assert len(A.risk.shortcuts.recordings) > 0


# ------------------------------------------------------------------------------------ what vectors share, kept


@pytest.fixture
def keeps(monkeypatch, lowered):
    """As on a GPU: what does not depend on the vectors is compiled apart and kept."""
    monkeypatch.setattr(risk_operator, "KEPT_ON", ("cpu",))
    monkeypatch.setattr(risk_operator, "TOGETHER", 3)
    return lowered


@pytest.mark.parametrize(("k", "parts"), [(1, 2), (3, 2), (4, 1)])
def test_what_many_vectors_share_is_not_kept(keeps, k, parts):
    H = ritz.Hessian(cases.problem("conv").risk(plan=ritz.Plan(compile=True, route="reverse")))
    for _ in range(2):
        H @ columns(H.dim, k)
    assert len(keeps) == parts
    assert (len(H.risk.shortcuts.held) > 0) is (parts == 2)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("matrix", ["Hessian", "GGN"])
@pytest.mark.parametrize("name", cases.NAMES)
def test_products_that_keep_what_vectors_share_are_right_on_every_network(keeps, name, matrix, replay):
    risk = cases.problem(name).risk(plan=ritz.Plan(compile=True, route="reverse", replay=replay))
    A = MATRICES[matrix](risk)
    for seed in range(4):
        V = columns(risk.dim, seed=seed)
        assert cases.relative(A @ V, cases.truth(name, matrix) @ V) < SAME
    assert len(keeps) == 2  # what is shared, and the rest; the ragged batches are taken as they are
    assert len(risk.shortcuts.held) > 0


def whole(model, X, Y):
    """The Hessian by another operator, of which nothing is kept."""
    return ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, Y), plan=ritz.Plan(cache=False)))


def dense_layer() -> tuple[ritz.Hessian, torch.Tensor, torch.Tensor]:
    """The compiled Hessian of a single layer, and its data."""
    X, Y = torch.randn(8, 3), torch.arange(8) % 3
    return ritz.Hessian(ritz.Risk(nn.Linear(3, 3), nn.CrossEntropyLoss(), (X, Y), plan=ritz.Plan(compile=True))), X, Y


@pytest.fixture
def kept():
    """A small network and its compiled Hessian, asked for twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3))
    X, Y = torch.randn(8, 3), torch.arange(8) % 3
    H = ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, Y), plan=ritz.Plan(compile=True)))
    for _ in range(3):
        H @ columns(H.dim)
    return model, X, Y, H


def test_what_vectors_share_is_computed_once(keeps, kept):
    model, *_, H = kept
    (_, shared), calls = keeps, []
    forward = shared.forward
    shared.forward = lambda *inputs: calls.append(len(inputs)) or forward(*inputs)
    for asked in (0, 1):  # once for the weights as they are, and that was before
        for seed in range(3):
            H @ columns(H.dim, seed=seed)
        assert (len(calls), len(H.risk.shortcuts.held)) == (asked, 1)
        model[0].weight.data.mul_(2)


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_when_a_weight_or_a_buffer_moves_nothing_of_before_is_used(keeps, kept, what):
    model, X, Y, H = kept
    V = columns(H.dim, seed=1)
    before = H @ V
    (model[0].weight if what == "weight" else model[2].running_var).data.mul_(1.5)
    torch.testing.assert_close(H @ V, whole(model, X, Y) @ V)
    assert cases.relative(H @ V, before) > 1e-2


def test_products_at_other_weights_within_one_walk_are_theirs(keeps, kept):
    model, X, Y, H = kept
    rows = columns(H.dim).T.contiguous()
    batch = next(iter(H.risk.batches))
    with H.risk.session():
        params = H.risk.params()
        moved = {name: 1.5 * p for name, p in params.items()}
        found = [H.batch_rows(at, batch, rows)[0] / 8 for at in (params, moved, params)]
    torch.testing.assert_close(found[0], found[2])
    model.load_state_dict({**model.state_dict(), **moved})
    torch.testing.assert_close(found[1], (whole(model, X, Y) @ rows.T).T)


def test_other_data_at_the_same_weights_are_not_taken_for_these(keeps, kept):
    model, _, Y, H = kept
    V = columns(H.dim)
    for seed in range(3):
        other = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ritz.Hessian(H.risk.on((other, Y))) @ V, whole(model, other, Y) @ V)


def test_where_data_are_not_cached_or_too_large_to_share_nothing_is_kept(keeps, monkeypatch):
    X, Y = torch.randn(8, 3), torch.arange(8) % 3
    for plan, room in ((ritz.Plan(compile=True, cache=False), 1e9), (ritz.Plan(compile=True), 100.0)):
        monkeypatch.setattr(risk_operator.RiskOperator, "_room", lambda self, room=room: room)
        H = ritz.Hessian(ritz.Risk(nn.Linear(3, 3), nn.CrossEntropyLoss(), (X, Y), plan=plan))
        for _ in range(3):
            H @ columns(H.dim)
        assert len(H.risk.shortcuts.held) == 0


def test_where_memory_runs_out_what_is_kept_goes_first(keeps, kept, caplog):
    *_, H = kept
    plain, short = H._product, [True]

    def product(*args):
        if H.risk.shortcuts.hold_memory and short:
            short.clear()
            raise torch.OutOfMemoryError("no room")
        return plain(*args)

    H._product = product
    V = columns(H.dim, seed=2)
    before = H._chunk
    for _ in range(3):
        H @ V
    assert (H._chunk, len(caplog.records)) == (before, 1)
    assert "is released" in caplog.text
    assert len(H.risk.shortcuts.held) == 0  # nor is it kept again, only to run out of memory in the next product


def test_a_part_that_writes_to_what_is_kept_is_not_trusted(keeps, monkeypatch, caplog):
    """As a compiler that takes memory for its own: a first product is right, and the next one is not."""

    def lowered(graph):
        def writes(*tensors):
            found = graph(*tensors)
            for kept in tensors[5:]:  # after vectors, weight, bias, inputs and labels
                kept.mul_(1.1) if kept.is_floating_point() else None
            return found

        return writes

    monkeypatch.setattr(compilation, "lowered", lowered)
    H, *_ = dense_layer()
    V = columns(H.dim)
    with caplog.at_level(logging.INFO, "ritz"):
        for _ in range(3):
            H @ V
    assert len(H.risk.shortcuts.compilations) == 0
    assert "off" in caplog.text


def test_a_graph_that_cannot_be_taken_apart_is_compiled_whole(keeps, monkeypatch, caplog):
    def refuse(graph, inputs):
        raise RuntimeError("an operation that writes")

    monkeypatch.setattr(compilation, "partition", refuse)
    H, X, Y = dense_layer()
    V = columns(H.dim)
    with caplog.at_level(logging.INFO, "ritz"):
        for _ in range(3):
            torch.testing.assert_close(H @ V, whole(H.risk.model, X, Y) @ V)
    assert len(keeps) == 1
    assert "compiled whole: RuntimeError: an operation that writes" in caplog.text
