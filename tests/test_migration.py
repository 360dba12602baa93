"""What `docs/migration.md` and `docs/peers.md` say of other packages, row by row, held against what they give.

Each test runs where the package is installed (constraints/oracles.txt) and is skipped, with the reason, elsewhere. The
truth is the dense matrix of one batch; the network is small enough for it.
"""

import copy
import warnings

import cases
import pytest
import torch
from torch import Tensor, nn

import ritz

clo_installed = pytest.mark.oracle("curvlinops")
he_installed = pytest.mark.oracle("hessian_eigenthings")
pyhessian_installed = pytest.mark.oracle("pyhessian")
backpack_installed = pytest.mark.oracle("backpack")

WIDE = ritz.Plan(chunk=100)


class Setting:
    """A small network with ragged batches, and even ones of the same data."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.X, self.y = torch.randn(60, 4), torch.randint(0, 3, (60,))
            self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
        self.params = list(self.model.parameters())
        self.loss = nn.CrossEntropyLoss()
        self.ragged = [(self.X[:25], self.y[:25]), (self.X[25:50], self.y[25:50]), (self.X[50:], self.y[50:])]
        self.even = [(self.X[:30], self.y[:30]), (self.X[30:], self.y[30:])]
        self.risk = ritz.Risk(self.model, self.loss, self.ragged, plan=WIDE)
        self.H, self.G = ritz.Hessian(self.risk), ritz.GGN(self.risk)

    def theirs(self, kind: str, batches: list | None = None, **keywords):
        """An operator of curvlinops."""
        import curvlinops as clo

        loss = keywords.pop("loss", self.loss)
        params = keywords.pop("params", self.params)
        return getattr(clo, f"{kind}LinearOperator")(self.model, loss, params, batches or self.ragged, **keywords)


@pytest.fixture(scope="module")
def at():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield Setting()
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def drawn():
    """Other packages draw from torch's own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def dense(operator) -> Tensor:
    """Of a peer's operator, column by column."""
    if hasattr(operator, "matvec"):
        return torch.stack([operator.matvec(e) for e in torch.eye(operator.size)], dim=1)
    return operator @ torch.eye(operator.shape[1])


def near(a: Tensor, b: Tensor) -> bool:
    return cases.relative(a, b) < 1e-9


# --------------------------------------------------------------------------------------------- PyHessian


@pyhessian_installed
@pytest.mark.filterwarnings("ignore")  # of create_graph
def test_products_and_eigenvalues_are_those_of_pyhessian_also_over_ragged_batches(at):
    from pyhessian import hessian

    theirs = hessian(copy.deepcopy(at.model), at.loss, dataloader=at.ragged, cuda=False)
    v = torch.randn(at.H.dim)
    form, product = theirs.dataloader_hv_product(list(at.risk.space.split(v).values()))
    assert near(torch.cat([part.flatten() for part in product]), at.H @ v)
    assert form == pytest.approx(float(v @ (at.H @ v)))
    assert [part.shape for part in product] == [p.shape for p in at.risk.space.split(at.H @ v).values()]
    values, vectors = theirs.eigenvalues(maxIter=500, tol=1e-8, top_n=2)
    pairs = ritz.top_eigenpairs(at.H, k=2, which="magnitude")
    assert values == pytest.approx(pairs.values.tolist(), rel=1e-4)
    for theirs_of, ours in zip(vectors, pairs.vectors.T, strict=True):
        assert float(torch.cat([part.flatten() for part in theirs_of]) @ ours) ** 2 == pytest.approx(1, abs=1e-3)


@pyhessian_installed
@pytest.mark.filterwarnings("ignore")
def test_pyhessian_finds_the_largest_eigenvalue_by_size_whatever_its_sign(at):
    from pyhessian import hessian

    def negative(out: Tensor, target: Tensor) -> Tensor:
        return -at.loss(out, target)

    theirs = hessian(copy.deepcopy(at.model), negative, data=(at.X, at.y), cuda=False)
    (value,), _ = theirs.eigenvalues(maxIter=500, tol=1e-8)
    H = ritz.Hessian(ritz.Risk(at.model, negative, (at.X, at.y)))
    assert value == pytest.approx(float(ritz.top_eigenpairs(H, k=1, which="magnitude").values[0]), rel=1e-4)
    assert value < 0 < float(ritz.top_eigenpairs(H, k=1).values[0])


@pyhessian_installed
@pytest.mark.filterwarnings("ignore")
def test_the_mean_of_the_list_of_pyhessian_is_the_trace_that_ritz_has_an_interval_for(at):
    from pyhessian import hessian

    truth = float(at.H.dense().trace())
    samples = torch.tensor(hessian(copy.deepcopy(at.model), at.loss, dataloader=at.ragged, cuda=False).trace(400, 0.0))
    assert len(samples) == 400
    assert abs(float(samples.mean()) - truth) < 4 * float(samples.std()) / 20
    ours = ritz.trace(at.H, "hutchinson", num_probes=100)
    low, high = ours.interval(0.9999)
    assert low < truth < high
    assert ours.samples.shape == (100,)
    loose = hessian(copy.deepcopy(at.model), at.loss, dataloader=at.ragged, cuda=False).trace()
    assert len(loose) <= 100  # stopped by its tolerance, or by maxIter


# -------------------------------------------------------------------------------------------- curvlinops


@clo_installed
@pytest.mark.parametrize("kind", ["Hessian", "GGN", "EF"])
def test_matrices_are_those_of_curvlinops_over_ragged_batches(at, kind):
    ours = {"Hessian": at.H, "GGN": at.G, "EF": ritz.EmpiricalFisher(at.risk)}[kind]
    assert near(ours.dense(), dense(at.theirs(kind)))


@clo_installed
def test_some_of_the_parameters_are_a_list_there_and_a_glob_here(at):
    last = at.theirs("Hessian", params=list(at.model[2].parameters()))
    ours = ritz.Hessian(ritz.Risk(at.model, at.loss, at.ragged, params="2.*"))
    assert near(ours.dense(), dense(last))


@clo_installed
def test_a_submatrix_there_is_a_block_here(at):
    import curvlinops as clo

    rows = list(range(25, 43))  # weight and bias of the last layer
    part = clo.SubmatrixLinearOperator(at.theirs("GGN"), rows, rows)
    assert near(at.G.block("2.*").dense(), part @ torch.eye(18))


@clo_installed
def test_the_monte_carlo_fisher_has_the_number_of_draws_under_another_name(at):
    theirs = dense(at.theirs("FisherMC", mc_samples=400))
    ours = ritz.Fisher(at.risk, num_samples=400).dense()
    truth = at.G.dense()
    assert cases.relative(theirs, truth) < 0.1
    assert cases.relative(ours, truth) < 0.1


@clo_installed
@pytest.mark.parametrize("ekfac", [False, True])
def test_kronecker_factors_and_their_inverse_are_those_of_curvlinops(at, ekfac):
    import curvlinops as clo

    kind = "EKFAC" if ekfac else "KFAC"
    theirs = at.theirs(kind, fisher_type="type-2", separate_weight_and_bias=False)
    ours = ritz.KFACOperator(at.risk, fisher="type2", ekfac=ekfac)
    assert cases.relative(ours.dense(), dense(theirs)) < 1e-9
    apart = at.theirs(kind, fisher_type="type-2")  # weight and bias of a layer in blocks of their own
    assert cases.relative(ours.dense(), dense(apart)) > 0.1
    inverse = clo.KFACInverseLinearOperator(theirs, damping=0.1, use_exact_damping=True)
    b = at.risk.gradient()
    assert cases.relative(ours.inverse(damping=0.1) @ b, inverse @ b) < 1e-9


@clo_installed
def test_the_default_fisher_of_a_kronecker_operator_is_drawn_there_and_exact_here(at):
    import inspect

    import curvlinops as clo

    assert inspect.signature(clo.KFACLinearOperator).parameters["fisher_type"].default == "mc"
    assert inspect.signature(ritz.KFACOperator).parameters["fisher"].default == "type2"


@clo_installed
def test_a_damped_inverse_by_conjugate_gradients_is_a_call_of_solve(at):
    import curvlinops as clo
    from curvlinops.examples import IdentityLinearOperator

    G = at.theirs("GGN")
    eye = IdentityLinearOperator([tuple(p.shape) for p in at.params], G.device, G.dtype)
    b = at.risk.gradient()
    inverse = clo.CGInverseLinearOperator(G + 0.1 * eye, tolerance=1e-4)
    found = ritz.solve(at.G + 0.1, b)
    assert cases.relative(found, inverse @ b) < 1e-2


@clo_installed
def test_sums_multiples_and_scipy_operators_are_made_in_the_same_way(at):
    H, G = at.theirs("Hessian"), at.theirs("GGN")
    v = torch.randn(at.H.dim)
    assert near((at.H + 2 * at.G) @ v, (H + 2 * G) @ v)
    assert near(torch.as_tensor(at.H.to_scipy() @ v.numpy()), torch.as_tensor(H.to_scipy() @ v.numpy()))
    assert near(at.H @ (at.G @ v), (H @ G) @ v)  # there is a product of operators there
    assert near(H.adjoint() @ v, at.H @ v)


@clo_installed
def test_eigsh_takes_eigenvalues_by_size_unless_told(at):
    from scipy.sparse.linalg import eigsh

    by_size = eigsh(at.theirs("Hessian").to_scipy(), k=4, return_eigenvectors=False)
    ours = ritz.top_eigenpairs(at.H, 4, which="magnitude")
    assert sorted(by_size) == pytest.approx(sorted(ours.values.tolist()), rel=1e-6)
    algebraic = eigsh(at.theirs("Hessian").to_scipy(), k=4, which="LA", return_eigenvectors=False)
    assert sorted(algebraic) == pytest.approx(sorted(ritz.top_eigenpairs(at.H, 4).values.tolist()), rel=1e-6)


@clo_installed
def test_traces_diagonals_and_norms_have_the_same_mean(at):
    import curvlinops as clo

    G, truth = at.theirs("GGN"), at.G.dense()
    for name, method in (("hutchinson_trace", "hutchinson"), ("hutchpp_trace", "hutch++"), ("xtrace", "xtrace")):
        found = torch.stack([getattr(clo, name)(G, num_matvecs=12) for _ in range(20)])
        assert abs(float(found.mean() - truth.trace())) < 4.5 * float(found.std()) / 20**0.5 + 1e-9
        ours = ritz.trace(at.G, method, num_probes=12)
        assert ours.interval(0.9999)[0] <= float(truth.trace()) <= ours.interval(0.9999)[1]
    diagonal = clo.hutchinson_diag(G, num_matvecs=40)
    assert cases.relative(diagonal, truth.diagonal()) < 0.5
    assert cases.relative(torch.as_tensor(ritz.diagonal(at.G, num_probes=40).value), truth.diagonal()) < 0.5
    assert clo.xdiag(G, num_matvecs=12).shape == (at.G.dim,)
    squares = torch.stack([clo.hutchinson_squared_fro(G, num_matvecs=12) for _ in range(40)])
    square = float(truth.square().sum())
    assert abs(float(squares.mean()) - square) < 4.5 * float(squares.std()) / 40**0.5
    assert float(ritz.spectrum(at.G).moment(2)) == pytest.approx(square, rel=1e-6)
    assert float(ritz.frobenius_norm(at.G)) ** 2 == pytest.approx(square, rel=0.2)


@clo_installed
def test_both_densities_are_those_of_the_eigenvalues(at):
    import curvlinops as clo
    from curvlinops.examples import TensorLinearOperator

    grid, theirs = clo.lanczos_approximate_spectrum(TensorLinearOperator(at.G.dense()), ncv=30, num_repeats=40)
    ours = torch.as_tensor(ritz.spectrum(at.G, num_steps=30, num_probes=4).density(grid).value)
    mean = float(at.G.dense().trace()) / at.G.dim
    for density, error in ((theirs, 0.25), (ours, 1e-3)):  # theirs has a draw of its own for each repeat
        assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=error)
        assert float(torch.trapezoid(density * grid, grid)) == pytest.approx(mean, rel=error)


@clo_installed
def test_batches_that_are_dictionaries_need_to_say_their_size_there(at):
    class Named(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: dict) -> Tensor:
            return self.inner(batch["x"])

    named = Named(at.model)
    batches = [({"x": x}, y) for x, y in at.ragged]
    import curvlinops as clo

    with pytest.raises(ValueError, match="batch_size_fn"):
        clo.HessianLinearOperator(named, at.loss, list(named.parameters()), batches)
    theirs = clo.HessianLinearOperator(
        named, at.loss, list(named.parameters()), batches, batch_size_fn=lambda batch: len(batch["x"])
    )
    ours = ritz.Hessian(ritz.Risk(named, at.loss, batches, plan=WIDE))
    assert near(ours.dense(), dense(theirs))


@clo_installed
def test_the_curvature_of_a_sum_is_the_number_of_items_times_that_of_the_mean(at):
    theirs = at.theirs("Hessian", loss=nn.CrossEntropyLoss(reduction="sum"))
    assert near((60 * at.H).dense(), dense(theirs))
    with pytest.raises((ValueError, ritz.errors.UnsupportedError), match="sum"):
        ritz.Risk(at.model, nn.CrossEntropyLoss(reduction="sum"), at.ragged)


@clo_installed
def test_a_model_that_does_not_repeat_itself_is_refused_by_both(at):
    import curvlinops as clo

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.randn_like(x))

    noisy = Noisy()
    with pytest.raises(RuntimeError, match="determin"):
        clo.HessianLinearOperator(noisy, at.loss, list(noisy.parameters()), at.ragged)
    with pytest.raises((ValueError, RuntimeError, ritz.errors.RitzError)):
        ritz.Risk(noisy, at.loss, at.ragged).check()


@clo_installed
def test_jacobians_and_other_inverses_are_there_and_not_here():
    import curvlinops as clo

    for name in ("Jacobian", "TransposedJacobian", "LSMRInverse", "NeumannInverse"):
        assert hasattr(clo, f"{name}LinearOperator")
    assert hasattr(clo, "lanczos_approximate_log_spectrum")
    assert not any("Jacobian" in name or "LSMR" in name for name in dir(ritz) + dir(ritz.operators))


@pytest.mark.slow
@clo_installed
@pytest.mark.filterwarnings("ignore")
def test_products_of_the_ggn_of_curvlinops_compile_in_one_piece_and_those_of_the_hessian_do_not(at):
    from torch import _dynamo

    def breaks(kind: str) -> int:
        operator = at.theirs(kind)
        _dynamo.reset()
        found = _dynamo.explain(lambda v: operator @ v)(torch.ones(43))
        _dynamo.reset()
        return found.graph_break_count

    assert [breaks(kind) for kind in ("GGN", "EF", "Hessian")] == [0, 0, 1]


# ----------------------------------------------------------------------------------- hessian-eigenthings


@he_installed
@pytest.mark.parametrize("method", ["autograd", "finite_difference"])
def test_the_hessian_is_that_of_hessian_eigenthings_by_either_method(at, method):
    import hessian_eigenthings as he

    theirs = he.HessianOperator(at.model, at.even, he.supervised_loss(at.loss), method=method)
    route = "difference" if method == "finite_difference" else "auto"
    ours = ritz.Hessian(at.risk, route=route)
    v = torch.randn(at.H.dim)
    assert cases.relative(ours @ v, theirs.matvec(v)) < (1e-9 if method == "autograd" else 1e-5)


@he_installed
def test_a_loss_of_model_and_batch_is_a_mean_there_and_a_sum_with_its_weight_here(at):
    import hessian_eigenthings as he

    theirs = he.HessianOperator(at.model, at.even, lambda model, batch: at.loss(model(batch[0]), batch[1]))
    summed = nn.CrossEntropyLoss(reduction="sum")
    ours = ritz.Risk(
        at.model, data=at.even, batch_loss=lambda model, batch: (summed(model(batch[0]), batch[1]), len(batch[1]))
    )
    assert near(ritz.Hessian(ours).dense(), dense(theirs))


@he_installed
def test_ggn_and_empirical_fisher_are_those_of_hessian_eigenthings(at):
    import hessian_eigenthings as he

    ggn = he.GGNOperator(at.model, at.even, he.supervised_forward, he.supervised_loss_of_output(at.loss))
    forward = ritz.Risk(at.model, at.loss, at.ragged, forward=he.supervised_forward, plan=WIDE)
    assert near(ritz.GGN(forward).dense(), dense(ggn).detach())  # products come with a graph there
    assert ggn.matvec(torch.ones(43)).requires_grad
    fisher = he.EmpiricalFisherOperator(at.model, at.even, he.supervised_per_sample_loss(at.loss))
    assert near(ritz.EmpiricalFisher(at.risk).dense(), dense(fisher).detach())


@he_installed
def test_filters_and_micro_batches_have_their_counterparts(at):
    import hessian_eigenthings as he

    loss = he.supervised_loss(at.loss)
    part = he.HessianOperator(at.model, at.even, loss, param_filter=he.match_names("2.*"))
    assert near(ritz.Hessian(ritz.Risk(at.model, at.loss, at.ragged, params="2.*")).dense(), dense(part))
    assert near(at.H.block("2.*").dense(), dense(part))
    pieces = he.HessianOperator(at.model, at.even, loss, microbatch_size=10)
    ours = ritz.Risk(at.model, at.loss, at.even, plan=ritz.Plan(micro_batch=7))
    v = torch.randn(at.H.dim)
    assert near(ritz.Hessian(ours) @ v, pieces.matvec(v))
    ragged = he.HessianOperator(at.model, at.even, loss, microbatch_size=29)  # a piece of one sample counts as much
    assert cases.relative(ragged.matvec(v), at.H @ v) > 1e-3


@he_installed
@pytest.mark.parametrize(("theirs", "ours"), [("LM", "magnitude"), ("LA", "largest"), ("SA", "smallest")])
def test_the_ends_of_the_spectrum_have_other_names(at, theirs, ours):
    import hessian_eigenthings as he

    operator = he.HessianOperator(at.model, at.even, he.supervised_loss(at.loss))
    found = he.lanczos(operator, k=3, max_iter=43, which=theirs, seed=0)
    pairs = ritz.top_eigenpairs(at.H, 3, which=ours)
    assert sorted(found.eigenvalues.tolist()) == pytest.approx(sorted(pairs.values.tolist()), rel=1e-6)
    assert found.eigenvectors.shape == (3, 43)  # rows there, columns here
    assert pairs.vectors.shape == (43, 3)


@he_installed
def test_lanczos_with_its_own_number_of_steps_may_not_have_converged_and_says_so(at):
    import hessian_eigenthings as he

    operator = he.HessianOperator(at.model, at.even, he.supervised_loss(at.loss))
    found = he.lanczos(operator, k=4, seed=0)
    assert found.iterations == 8
    assert not bool(found.converged.all())


@he_installed
def test_traces_and_densities_are_those_of_the_matrix(at):
    import hessian_eigenthings as he

    operator = he.HessianOperator(at.model, at.even, he.supervised_loss(at.loss))
    truth = float(at.H.dense().trace())
    for method in ("hutchinson", "hutch++"):
        found = he.trace(operator, num_matvecs=30, method=method, seed=0)
        assert abs(found.estimate - truth) < 5 * found.stderr + 1e-9
        ours = ritz.trace(at.H, method, num_probes=30)
        low, high = ours.interval(0.9999)
        assert low <= truth <= high
    density = he.spectral_density(operator, num_runs=6, lanczos_steps=30, seed=0)
    ours = ritz.spectrum(at.H, num_steps=30, num_probes=6).density(density.grid, width=density.sigma)
    for curve in (density.density, torch.as_tensor(ours.value)):
        mean = float(torch.trapezoid(curve * density.grid, density.grid))
        assert mean == pytest.approx(truth / at.H.dim, rel=0.3)


@he_installed
def test_an_operator_from_a_function_takes_columns_here_and_a_vector_there(at):
    import hessian_eigenthings as he

    A = at.G.dense()
    theirs = he.LambdaOperator(lambda v: A @ v, 43)
    ours = ritz.operators.FunctionOperator(lambda V: A @ V, 43, torch.float64)
    v = torch.randn(43)
    assert near(ours @ v, theirs.matvec(v))


@he_installed
def test_power_iteration_of_hessian_eigenthings_finds_the_largest_by_size(at):
    import hessian_eigenthings as he

    operator = he.HessianOperator(at.model, at.even, he.supervised_loss(at.loss))
    found = he.deflated_power_iteration(operator, k=2, max_iter=500, tol=1e-9, seed=0)
    ours = ritz.top_eigenpairs(at.H, 2, which="magnitude")
    assert found.eigenvalues.tolist() == pytest.approx(ours.values.tolist(), rel=1e-3)


@he_installed
def test_lanczos_of_hessian_eigenthings_fails_in_bfloat16_where_its_products_work(at):
    import hessian_eigenthings as he

    model = copy.deepcopy(at.model).bfloat16()
    operator = he.HessianOperator(model, [(at.X.bfloat16(), at.y)], he.supervised_loss(at.loss))
    assert operator.matvec(torch.ones(43, dtype=torch.bfloat16)).isfinite().all()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)bfloat16"):
        he.lanczos(operator, k=1, max_iter=4, seed=0)
    risk = ritz.Risk(model, at.loss, [(at.X.bfloat16(), at.y)], dtype=torch.float32)
    assert ritz.top_eigenpairs(ritz.Hessian(risk), 1).values.isfinite().all()


# ----------------------------------------------------------------------------------------------- BackPACK


@backpack_installed
@pytest.mark.filterwarnings("ignore")  # of its hooks
def test_what_backpack_gives_in_one_backward_pass_is_what_the_matrices_say(at):
    from backpack import backpack, extend
    from backpack.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact, Variance

    model, loss = extend(copy.deepcopy(at.model)), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad(), Variance(), DiagGGNExact(), BatchDiagGGNExact()):
        loss(model(at.X), at.y).backward()

    def flat(name: str, start: int) -> Tensor:
        return torch.cat([getattr(p, name).flatten(start) for p in model.parameters()], dim=-1)

    assert near(flat("diag_ggn_exact", 0), at.G.dense().diagonal())
    rows = 60 * flat("grad_batch", 1)  # (N, P): there divided by N, as the mean loss is
    assert near(rows.T @ rows / 60, ritz.EmpiricalFisher(at.risk).dense())
    single = [ritz.GGN(at.risk.on((at.X[i : i + 1], at.y[i : i + 1]))).dense().diagonal() for i in range(3)]
    assert near(60 * flat("diag_ggn_exact_batch", 1)[:3], torch.stack(single))
    assert near(60**2 * flat("variance", 0), rows.var(0, unbiased=False))


@backpack_installed
def test_a_layer_that_backpack_does_not_know_is_refused_there(at):
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    model, loss = extend(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match="LayerNorm"), backpack(DiagGGNExact()):
            loss(model(at.X), at.y).backward()
