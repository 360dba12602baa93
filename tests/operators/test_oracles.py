"""The same matrices as other packages give, where they apply; and where they do not, the difference, written down."""

import copy

import cases
import pytest
import torch
from torch import Tensor, nn

import ritz

WIDE = ritz.Plan(chunk=200)
PLAIN = ("mlp_relu", "conv", "residual", "frozen")  # unweighted cross-entropy, every parameter used, no attention

curvlinops = pytest.mark.oracle("curvlinops")
eigenthings = pytest.mark.oracle("hessian_eigenthings")


def other(problem: cases.Problem, kind: str, batches: list | None = None, **keywords) -> Tensor:
    """The dense matrix that curvlinops gives."""
    import curvlinops as clo

    model = copy.deepcopy(problem.model).eval()
    params = [p for p in model.parameters() if p.requires_grad]
    operator = getattr(clo, f"{kind}LinearOperator")(
        model, problem.loss, params, batches or problem.batches, **keywords
    )
    return operator @ torch.eye(operator.shape[0])


def eigenthings_hessian(problem: cases.Problem, batches: list) -> Tensor:
    """The dense matrix that hessian-eigenthings gives."""
    from hessian_eigenthings.loss_fns import supervised_loss
    from hessian_eigenthings.operators import HessianOperator

    operator = HessianOperator(copy.deepcopy(problem.model).eval(), batches, supervised_loss(problem.loss))
    return torch.stack([operator.matvec(e) for e in torch.eye(operator.size)], dim=1)


@curvlinops
@pytest.mark.parametrize("name", [*PLAIN, "mlp_soft", "mlp_mse", "mlp_bce"])
@pytest.mark.parametrize(("matrix", "kind"), [("Hessian", "Hessian"), ("GGN", "GGN")])
def test_hessian_and_ggn_are_those_of_curvlinops(name, matrix, kind):
    problem = cases.problem(name)
    ours = getattr(ritz, matrix)(problem.risk(plan=WIDE)).dense()
    assert cases.relative(ours, other(problem, kind)) < 1e-10


@curvlinops
@pytest.mark.parametrize("name", PLAIN)
def test_the_empirical_fisher_is_that_of_curvlinops(name):
    problem = cases.problem(name)
    ours = ritz.EmpiricalFisher(problem.risk(plan=WIDE)).dense()
    assert cases.relative(ours, other(problem, "EF")) < 1e-10


@curvlinops
@pytest.mark.parametrize("name", ["mlp_mse", "mlp_bce"])
def test_with_several_outputs_curvlinops_counts_every_output_as_an_item(name):
    """There the empirical Fisher is D times ours: outer products of sums over outputs, not of means."""
    problem = cases.problem(name)
    ours = ritz.EmpiricalFisher(problem.risk(plan=WIDE)).dense()
    assert cases.relative(2 * ours, other(problem, "EF")) < 1e-10


@curvlinops
@pytest.mark.parametrize("name", ["mlp_relu", "mlp_mse"])
def test_both_monte_carlo_fishers_have_the_same_mean(name):
    problem = cases.problem(name)
    risk = problem.risk(plan=WIDE)
    theirs = torch.stack([other(problem, "FisherMC", mc_samples=8, seed=s) for s in range(24)])
    ours = torch.stack([ritz.Fisher(risk, 8, seed=s).dense() for s in range(24)])
    V = ritz.GGN(risk).probes(range(4), seed=0, distribution="normal")
    forms = [torch.einsum("ki,sij,kj->sk", V, F, V) for F in (ours, theirs)]
    error = sum(f.var(0) / len(f) for f in forms).sqrt()
    assert float(((forms[0].mean(0) - forms[1].mean(0)) / error).abs().max()) < 4.5


@eigenthings
@pytest.mark.parametrize("name", ["mlp_relu", "conv", "residual", "mlp_mse"])
def test_the_hessian_is_that_of_hessian_eigenthings_on_batches_of_one_size(name):
    problem = cases.problem(name)
    X, y = problem.data
    batches = cases.split(X[:10], y[:10], (5, 5))
    ours = ritz.Hessian(problem.risk(batches, plan=WIDE)).dense()
    assert cases.relative(ours, eigenthings_hessian(problem, batches)) < 1e-10


# ---------------------------------------------------------------------------------- where the others are wrong


@eigenthings
def test_hessian_eigenthings_gives_every_batch_the_same_weight_however_small_it_is():
    problem = cases.problem("mlp_relu")
    truth = cases.truth("mlp_relu", "Hessian")
    assert cases.relative(ritz.Hessian(problem.risk(plan=WIDE)).dense(), truth) < 1e-10
    assert cases.relative(eigenthings_hessian(problem, problem.batches), truth) > 0.05
    whole = eigenthings_hessian(problem, [problem.data])  # the same package on the same data, not cut
    assert cases.relative(whole, truth) < 1e-10


class ClassesSecond(nn.Module):
    """A language model with its classes where nn.CrossEntropyLoss looks for them, (batch, classes, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.output = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.mix(self.embedding(tokens)))).transpose(1, 2)


@curvlinops
@pytest.mark.parametrize("what", ["ignored tokens", "weighted classes"])
def test_curvlinops_weights_batches_by_their_length_whatever_the_loss_counts(what):
    if what == "ignored tokens":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            problem = cases.Problem(ClassesSecond(), nn.CrossEntropyLoss(), cases.problem("language").batches)
    else:
        problem = cases.problem("mlp_weighted")
    truth = cases.dense_hessian(problem)
    assert cases.relative(ritz.Hessian(problem.risk(plan=WIDE)).dense(), truth) < 1e-10
    assert cases.relative(other(problem, "Hessian"), truth) > 0.05
    assert cases.relative(other(problem, "Hessian", [problem.data]), truth) < 1e-10  # the same data, not cut


@curvlinops
def test_curvlinops_has_no_hessian_where_a_parameter_is_unused():
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        other(cases.problem("unused"), "Hessian")
    ours = ritz.Hessian(cases.problem("unused").risk(plan=WIDE)).dense()
    assert cases.relative(ours, cases.truth("unused", "Hessian")) < 1e-10
