"""Models that are awkward to differentiate: recurrent, sparse, frozen, tied, checkpointed, bfloat16, of many words."""

import contextlib
import copy
import weakref

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ritz
from ritz import modes
from ritz.losses import cross_entropy
from ritz.operators.blocks import block_diagonal

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, 4, generator=G), torch.randint(3, (10,), generator=G)
CE = nn.CrossEntropyLoss()


def built(make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def problem(model, x=X, y=Y) -> cases.Problem:
    return cases.Problem(model, CE, cases.split(x, y, (7, 3)))


@contextlib.contextmanager
def plain_kernels():
    """For the truth: recurrent kernels of oneDNN have no second derivative."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def check(given: cases.Problem, tolerance: float = 1e-9) -> None:
    """Products by every way, alone and many at once, and those of blocks, against dense truth."""
    with plain_kernels():
        hessian, ggn = cases.dense_hessian(given), cases.dense_ggn(given)
    risk = given.risk()
    V = risk.space.probes(range(3), seed=0, dtype=torch.float64)
    for A, truth in (
        (ritz.Hessian(risk), hessian), (ritz.Hessian(risk, route="reverse"), hessian), (ritz.GGN(risk), ggn)
    ):  # fmt: skip
        assert cases.relative(A.rows(V), V @ truth) < tolerance
        assert cases.relative(A.rows(V[:1]), V[:1] @ truth) < tolerance
        image = block_diagonal(A, {name: [name] for name in risk.names}).rows(V)
        for place in risk.space.slices.values():
            assert torch.allclose(image[:, place], V[:, place] @ truth[place, place], atol=1e-9)


# ----------------------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.reshape(len(x), 2, 2))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_networks_have_curvature(kind):
    check(problem(built(lambda: Recurrent(kind))))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_on_a_gpu_recurrent_networks_have_the_products_of_a_cpu(kind):
    here = problem(built(lambda: Recurrent(kind))).risk()
    there = here.to("cuda")
    V = here.space.probes(range(3), seed=0, dtype=torch.float64)
    for matrix in (ritz.Hessian, ritz.GGN):
        assert cases.relative(matrix(there).rows(V.cuda()).cpu(), matrix(here).rows(V)) < 1e-9


def test_cudnn_is_off_inside_products_of_recurrent_networks():
    """Its recurrent kernels have no second derivative; the flag is set for a device that need not be there."""
    before = torch.backends.cudnn.enabled
    with modes._no_fused_layers([nn.LSTM(2, 2)], torch.device("cuda")):
        assert not torch.backends.cudnn.enabled
    with modes._no_fused_layers([nn.Linear(2, 2)], torch.device("cuda")):
        assert torch.backends.cudnn.enabled == before  # convolutions keep it
    assert torch.backends.cudnn.enabled == before


class Packed(nn.Module):
    """Sequences of different lengths, whose kernels read memory that torch.func's tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(
            x.reshape(len(x), 2, 2), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.cell(packed)[1][-1])


def test_packed_sequences_have_curvature():
    given = problem(built(Packed))
    check(given)
    with pytest.raises(ritz.errors.UnsupportedError, match="operation GRU has no second derivative by the forward"):
        ritz.Hessian(given.risk(), route="forward") @ torch.ones(given.risk().dim)


# ----------------------------------------------------------------------- forward derivatives that are wrong or fail


class Product(nn.Module):
    """torch's forward derivative of a product that is scattered is wrong, and its backward pass is right."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.zeros(len(x), 3, dtype=torch.long)
        return self.head(self.a(x).scatter_reduce(1, place, self.b(x), "prod"))


class Twisted(nn.Module):
    """Complex weights as pairs of real ones, which torch views only where numbers begin at even places."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ torch.view_as_complex(self.weight)).abs() + self.bias


@pytest.mark.filterwarnings("ignore:forward and reverse products disagree")
@pytest.mark.parametrize("kind", [Product, Twisted])
def test_products_do_not_rely_on_forward_mode_alone(kind):
    given = problem(built(kind))
    check(given)
    found = ritz.sample_traces(given.risk(), num_probes=3, method="probes")
    V = given.risk().space.probes(range(3), 0, dtype=torch.float64)
    forms = (V @ cases.dense_hessian(given) * V).sum(1)
    assert torch.allclose(found.samples.mean(1), forms)  # every sample has weight 1


def test_a_wrong_forward_derivative_is_seen_in_a_large_network_in_float32():
    class Wide(Product):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))

    given = problem(built(Wide))
    G, exact = ritz.GGN(given.risk(dtype=torch.float32)), ritz.GGN(given.risk())
    exact._forward_mode = False
    v = exact.probes([3], seed=1)
    assert cases.relative(G.rows(v.float()).double(), exact.rows(v)) < 1e-5


class Implicit(nn.Module):
    """A fixed point z = tanh(W z + a(x)); a hook solves for its gradient, and is a constant to a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.head = nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        nn.init.eye_(self.w.weight).data.mul_(0.4)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.w(z) + self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), 3)
        with torch.no_grad():
            for _ in range(60):
                z = self.step(z, x)
        z = self.step(z, x)
        if z.requires_grad:
            start = z.detach().clone().requires_grad_()
            again = self.step(start, x)

            def solved(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(60):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
                return found

            z.register_hook(solved)
        return self.head(z)


class Unrolled(Implicit):
    """The same by sixty steps."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), 3)
        for _ in range(60):
            z = self.step(z, x)
        return self.head(z)


def test_a_backward_pass_that_hides_what_it_depends_on_gives_no_products_and_an_exact_diagonal():
    implicit, truth = ritz.GGN(problem(built(Implicit)).risk()), ritz.GGN(problem(built(Unrolled)).risk())
    with pytest.raises(ritz.errors.UnsupportedError, match=r"a hook changes the gradients.*method='exact'"):
        implicit.dense()
    found = ritz.diagonal(implicit, method="exact")
    assert torch.allclose(found.value, truth.dense().diagonal())


def test_vectors_with_zeros_do_not_settle_whether_forward_mode_is_right():
    given = problem(built(Product))
    G = ritz.GGN(given.risk())
    first = torch.zeros(G.dim)
    first[-1] = 1.0  # a bias that the product does not depend on
    v = torch.ones(G.dim)
    for row in (first, v):
        assert cases.relative(G @ row, cases.dense_ggn(given) @ row) < 1e-9


# ---------------------------------------------------------------------------------------------- mixtures


class Mixture(nn.Module):
    """Each input goes to one of four experts, found by its first entry; two of them get none."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.gate, self.head, self.skip = nn.Linear(4, 4), nn.Linear(5, 3), skip
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] > 0).long()  # never 2 or 3
        share = self.gate(x).softmax(-1)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            mine = choice == number
            if self.skip:  # as language models do: only its own inputs, or no call at all
                if not bool(mine.any()):
                    continue
                places = mine.nonzero()[:, 0]
                out = out.index_add(0, places, share[places, number, None] * torch.tanh(expert(x[places])))
            else:
                out = out + (mine * share[:, number])[:, None] * torch.tanh(expert(x))
        return self.head(out)


@pytest.mark.parametrize("skip", [True, False])
def test_experts_without_inputs_have_zero_blocks(skip):
    given = problem(built(lambda: Mixture(skip)))
    check(given)
    risk = given.risk()
    for A in (ritz.Hessian(risk, route="reverse"), ritz.GGN(risk)):
        assert not bool(A.block("experts.2.*").dense().any())
        assert not bool((A @ torch.ones(risk.dim))[risk.space.slices["experts.3.bias"]].any())
    found = ritz.block_spectra(ritz.Hessian(risk, route="reverse"), num_steps=2, num_probes=13)
    assert float(found["experts.3"].frobenius_norm) == 0.0
    assert float(found["experts.0"].frobenius_norm) > 0.0


# ------------------------------------------------------------------------------------- some of the parameters


class LoRA(nn.Module):
    """A frozen linear layer and a correction of rank one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(1, inputs) / 2)
        self.up = nn.Parameter(torch.randn(outputs, 1) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_corrections_of_low_rank_have_curvature_of_their_size():
    given = problem(built(lambda: nn.Sequential(LoRA(4, 6), nn.Tanh(), LoRA(6, 3))))
    assert given.risk().dim == 4 + 6 + 6 + 3
    check(given)


def test_the_head_of_a_frozen_backbone_is_a_block_of_the_whole():
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))
    whole = cases.dense_hessian(problem(model))[-21:, -21:]
    frozen = copy.deepcopy(model)
    frozen[:3].requires_grad_(False)
    for risk in (problem(frozen).risk(), problem(model).risk(params="3.*")):
        assert risk.dim == 21
        assert cases.relative(ritz.Hessian(risk).dense(), whole) < 1e-9
    assert all(p.requires_grad == (name[0] == "3") for name, p in frozen.named_parameters())


class Tied(nn.Module):
    """Words in, words out, by one matrix."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(words, width), nn.Linear(width, width)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.mix(self.embedding(tokens))))


def test_tied_embeddings_are_one_parameter():
    words = torch.randint(3, (10,), generator=torch.Generator().manual_seed(1))
    given = problem(built(lambda: Tied(3, 4)), words)
    assert given.risk().names == ("embedding.weight", "mix.weight", "mix.bias")
    check(given)


# ---------------------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 5), nn.Linear(5, 3), reentrant
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_give_the_same_curvature(reentrant):
    model, plain = built(lambda: Checkpointed(reentrant)), built(lambda: Checkpointed(None))
    risk, truth = problem(model).risk(), problem(plain)
    hessian, ggn = cases.dense_hessian(truth), cases.dense_ggn(truth)
    V = risk.space.probes(range(3), seed=0, dtype=torch.float64)
    for route in ("forward", "reverse", "auto"):
        assert cases.relative(ritz.Hessian(risk, route=route).rows(V), V @ hessian) < 1e-9
    assert cases.relative(ritz.GGN(risk).rows(V), V @ ggn) < 1e-9
    other = {name: p + 0.1 for name, p in risk.params().items()}  # not the weights that the model has
    assert torch.allclose(risk.at(other).gradient(), truth.risk().at(other).gradient(), atol=1e-12)
    traces = ritz.sample_traces(risk).value, ritz.sample_traces(truth.risk()).value
    assert torch.allclose(*traces, atol=1e-9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_recomputes_as_before(reentrant):
    model = built(lambda: Checkpointed(reentrant))
    calls = []
    model.middle.register_forward_pre_hook(lambda *_: calls.append(1))
    ritz.Hessian(problem(model).risk()) @ torch.ones(sum(p.numel() for p in model.parameters()))
    calls.clear()
    CE(model(X), Y).backward()
    assert len(calls) == 2  # once more in the backward pass
    assert all(p.grad is not None for p in model.parameters())


# --------------------------------------------------------------------------------------------- precision


def test_weights_in_bfloat16_are_measured_with_vectors_in_float32():
    """Products in float32 of the weights as they are rounded; no matrix is multiplied in bfloat16."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).to(torch.bfloat16)
    risk = ritz.Risk(model, CE, (X.to(torch.bfloat16), Y), dtype=torch.float32)
    H = ritz.Hessian(risk)
    assert H.dtype == torch.float32
    exact = copy.deepcopy(model).double()
    truth = cases.dense_hessian(cases.Problem(exact, CE, [(X.to(torch.bfloat16).double(), Y)]))
    assert cases.relative(H.dense().double(), truth) < 1e-5
    assert ritz.spectrum(H, num_steps=5, num_probes=2).trace.value == pytest.approx(float(truth.trace()), rel=1e-4)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# ------------------------------------------------------------------------------------- many words


class Held(TorchDispatchMode):
    """The most bytes of new tensors that are alive at once; a view keeps its storage alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.users: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)} - self.users.keys()
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and (key := one.untyped_storage()._cdata) not in given:
                self._count(one, key, one.untyped_storage().nbytes())
        return out

    def _count(self, tensor: Tensor, key: int, size: int) -> None:
        self.now += 0 if self.users.get(key) else size
        self.users[key] = self.users.get(key, 0) + 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self.now -= size


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cross_entropy, "PIECE", 300)


@pytest.mark.parametrize("shape", [(7, 50), (3, 4, 50), (3, 50, 4)])
@pytest.mark.parametrize("many", [False, True])
def test_the_middle_in_pieces_is_the_middle(shape, many, monkeypatch):
    g = torch.Generator().manual_seed(0)
    out, u = torch.randn(shape, generator=g), torch.randn(3, *shape, generator=g)
    dim = 1 if shape == (3, 50, 4) else len(shape) - 1
    y = torch.randint(50, [n for d, n in enumerate(shape) if d != dim], generator=g)
    y.view(-1)[2] = -100
    loss = cross_entropy.CrossEntropy(class_dim=dim, class_weight=torch.rand(50, generator=g))

    def middle(v):
        return loss.middle("ggn", out, (None, y), v)

    apply = torch.func.vmap(middle) if many else lambda v: torch.stack([middle(one) for one in v])
    whole = apply(u)
    monkeypatch.setattr(cross_entropy, "PIECE", 120)
    assert torch.allclose(apply(u), whole, atol=1e-14)
    total = loss.total
    flat = cases.hessian_of(total(x := out.clone().requires_grad_(), (None, y)), [x])
    assert torch.allclose(whole[0].flatten(), flat @ u[0].flatten(), atol=1e-10)


def test_a_product_of_a_large_vocabulary_holds_one_copy_of_its_logits(monkeypatch):
    """The image itself, and a piece or two: not the probabilities, nor what is made of them."""
    tokens, words = 100, 5_000
    monkeypatch.setattr(cross_entropy, "PIECE", 20 * words)
    g = torch.Generator().manual_seed(0)
    out, u = (torch.randn(tokens, words, generator=g) for _ in range(2))
    y = torch.randint(words, (tokens,), generator=g)
    loss = cross_entropy.CrossEntropy()
    with Held() as held:
        loss.middle("ggn", out, (None, y), u)
    size = out.untyped_storage().nbytes()
    assert held.most < 1.5 * size
    monkeypatch.setattr(cross_entropy, "PIECE", 1 << 40)
    with Held() as whole:
        loss.middle("ggn", out, (None, y), u)
    assert whole.most > 1.9 * size  # so the count can tell


def test_a_whole_product_holds_no_more_than_its_tangent_does(monkeypatch):
    """Four of the size of the logits: the outputs, and the two terms of their derivative and the sum of these."""
    tokens, words = 64, 4_000
    monkeypatch.setattr(cross_entropy, "PIECE", 4 * words)
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(words, (tokens,), generator=g) for _ in range(2))
    G = ritz.GGN(ritz.Risk(built(lambda: Tied(words, 2)), CE, (x, y)))
    v = G.probes([0], seed=0)
    G.rows(v)  # what is looked at once
    with Held() as held:
        G.rows(v)
    assert 2.9 < held.most / (8 * tokens * words) < 4.2


def test_the_gauss_newton_matrix_of_a_large_vocabulary_is_right_in_pieces(small_pieces):
    words = torch.randint(3, (10,), generator=torch.Generator().manual_seed(1))
    given = cases.Problem(built(lambda: Tied(53, 1)), CE, cases.split(words, words * 17 + 3, (4, 4, 2)))
    risk = given.risk()
    V = risk.space.probes(range(3), seed=0, dtype=torch.float64)
    assert cases.relative(ritz.GGN(risk).rows(V), V @ cases.dense_ggn(given)) < 1e-9


# ---------------------------------------------------------------------------------------- Hugging Face


def test_a_tiny_gpt2_with_tied_weights_has_curvature():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=6, n_embd=4, n_layer=1, n_head=2, attn_implementation="eager", bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = built(lambda: transformers.GPT2LMHeadModel(config)).double()
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))

    def logits(model, batch):
        return model(batch[0], use_cache=False).logits[:, :-1]

    risk = ritz.Risk(
        model, ritz.losses.CrossEntropy(class_dim=-1, target=lambda b: b[0][:, 1:]), (tokens,), forward=logits
    )
    assert "lm_head.weight" not in risk.names  # it is the embedding
    out = logits(model, (tokens,))
    loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
    params = [p for p in model.parameters() if p.requires_grad]
    v = risk.space.probes([0], seed=0, dtype=torch.float64)[0]
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    along = sum((g * part).sum() for g, part in zip(slopes, risk.space.split(v).values(), strict=True))
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(along, params, materialize_grads=True)])
    for route in ("reverse", "auto"):
        assert torch.allclose(ritz.Hessian(risk, route=route) @ v, truth, atol=1e-9)
    found = ritz.block_spectra(ritz.GGN(risk), num_steps=3, num_probes=2)
    assert "transformer.wte" in found
    assert float(found["transformer.wte"].trace) > 0
