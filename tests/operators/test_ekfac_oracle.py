"""EKFAC against per-sample gradients and against curvlinops; what is left free where a factor is singular."""

import cases
import pytest
import torch
from cases import draw
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import ritz
from ritz.operators import KFACOperator
from ritz.operators.kronecker import Eigenspace

FEW, MANY = 11, 40  # samples; the widest factor has 19 rows
CLASSES = 3


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2, bias=False, padding=(1, 0), dilation=(2, 1)),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(18, CLASSES),
        )


def data(samples: int) -> list[tuple[Tensor, Tensor]]:
    X, y = draw(samples, 2, 6, 6), torch.arange(samples) % CLASSES
    return cases.split(X, y, (4, samples - 4))


def ours(samples: int, kind: str, sharing: str, **keywords) -> KFACOperator:
    risk = ritz.Risk(network(), nn.CrossEntropyLoss(), data(samples))
    return KFACOperator(risk, kind, sharing=sharing, **{"ekfac": True, **keywords})


def theirs(samples: int, kind: str, sharing: str) -> Tensor:
    """The dense matrix that curvlinops gives."""
    import curvlinops as clo

    model = network()
    operator = clo.EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        data(samples),
        fisher_type={"type2": "type-2", "empirical": "empirical"}[kind],
        kfac_approx=sharing,
        separate_weight_and_bias=False,
    )
    return operator @ torch.eye(operator.shape[0])


def per_sample_roots(samples: int, kind: str) -> dict[str, Tensor]:
    """Rows r_nk, (n, k, *shape) by parameter, whose outer products have the matrix as their mean over n.

    For the empirical Fisher k = 1 and r_n is the gradient of sample n; for the GGN r_nk = sum_c R_ck J_nc with
    R R' = diag(p) - p p', the Hessian of the loss in the outputs, by its eigenvectors.
    """
    model, (X, y) = network(), (torch.cat(part) for part in zip(*data(samples), strict=True))
    params = dict(model.named_parameters())

    def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, x[None])[0]

    jacobians = vmap(jacrev(outputs), (None, 0))(params, X)  # (n, classes, *shape)
    p = model(X).detach().softmax(1)
    if kind == "empirical":
        root = (p - nn.functional.one_hot(y, CLASSES))[..., None]  # (n, classes, 1)
    else:
        values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None])
        root = vectors * values.clamp(min=0).sqrt()[:, None]
    return {name: torch.einsum("nc...,nck->nk...", J, root).detach() for name, J in jacobians.items()}


def rotated(operator: KFACOperator, samples: int, kind: str, turn: dict[str, Tensor]) -> dict[str, Tensor]:
    """s_ij = mean_n sum_k (Q_G' r_nk Q_A)_ij^2 for every block, Q_A turned where `turn` says so."""
    roots, found = per_sample_roots(samples, kind), {}
    for name, unit in operator.units.items():
        space = operator.blocks()[name]
        left, right = space.left[0], space.right[0] @ turn.get(name, torch.eye(unit.inputs))
        rows = torch.cat([roots[p].reshape(*roots[p].shape[:2], unit.outputs, -1) for p in unit.params.values()], -1)
        found[name] = (left.T @ rows @ right).square().sum((0, 1)) / samples
    return found


def null_space(operator: KFACOperator, name: str) -> Tensor:
    """Which eigenvectors of A are in its null space, (inputs,)."""
    values = torch.linalg.eigvalsh(operator.factors()[name][1][0])
    return values < 1e-12 * values[-1]


# ------------------------------------------------------------------------------------------- against truth


@pytest.mark.parametrize("samples", [FEW, MANY])
@pytest.mark.parametrize("kind", ["type2", "empirical"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_its_eigenvalues_are_the_second_moments_of_per_sample_gradients_in_its_basis(samples, kind, sharing):
    """With and without a null space: for the basis that it has chosen, its eigenvalues are the right ones."""
    operator = ours(samples, kind, sharing)
    for name, truth in rotated(operator, samples, kind, {}).items():
        assert cases.relative(operator.blocks()[name].values[0], truth) < 1e-11, name


# ------------------------------------------------------------------------------------------- against curvlinops


@pytest.mark.oracle("curvlinops")
@pytest.mark.parametrize("kind", ["type2", "empirical"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_where_no_eigenvalue_is_repeated_it_is_the_ekfac_of_curvlinops(kind, sharing):
    operator = ours(MANY, kind, sharing)
    for factors in operator.factors().values():
        for factor in factors:
            values = torch.linalg.eigvalsh(factor[0])
            assert float(values.diff().min() / values[-1]) > 1e-6  # one basis, up to signs
    assert cases.relative(operator.dense(), theirs(MANY, kind, sharing)) < 1e-10


@pytest.mark.oracle("curvlinops")
@pytest.mark.parametrize("kind", ["type2", "empirical"])
def test_with_fewer_samples_than_inputs_the_two_differ_in_the_null_space_alone(kind):
    """Under "reduce" A has the rank of the samples, but per-sample gradients, sums over positions, leave its range."""
    operator = ours(FEW, kind, "reduce")
    mine, other = operator.dense(), theirs(FEW, kind, "reduce")
    assert cases.relative(mine, other) > 1e-3
    outside = {}
    for name, unit in operator.units.items():
        space, null = operator.blocks()[name], null_space(operator, name)
        index = unit.gather(operator.space.split(torch.arange(operator.dim))).flatten()
        basis = torch.kron(space.left[0].contiguous(), space.right[0][:, ~null].contiguous())
        one, two = (basis.T @ matrix[index[:, None], index] @ basis for matrix in (mine, other))
        assert int((~null).sum()) == min(FEW, unit.inputs), name
        assert cases.relative(one, two) < 1e-9, name
        assert float(mine[index, index].sum()) == pytest.approx(float(other[index, index].sum()), rel=1e-10)  # traces
        outside[name] = float(space.values[0][:, null].sum())
    assert min(outside["0"], outside["2"]) > 1e-4 > 1e-12 > outside["5"]


# ------------------------------------------------------------------------------------------- what is left free


def test_another_basis_of_the_null_space_changes_ekfac_by_as_much_and_kfac_not_at_all():
    operator = ours(FEW, "type2", "reduce")
    plain = ours(FEW, "type2", "reduce", ekfac=False)
    null, space = null_space(operator, "0"), operator.blocks()["0"]
    turn = torch.eye(len(null))
    turn[null.nonzero(), null.nonzero().T] = torch.linalg.qr(draw(int(null.sum()), int(null.sum()))).Q
    other = Eigenspace(rotated(operator, FEW, "type2", {"0": turn})["0"][None], space.left, space.right @ turn)
    unit = torch.eye(space.values.numel()).reshape(-1, *space.values.shape)
    dense = [each.apply(unit, each.values).flatten(1) for each in (space, other)]
    assert 0.02 < cases.relative(dense[1], dense[0]) < 0.5
    kron = plain.blocks()["0"]
    turned = Eigenspace(kron.values, kron.left, kron.right @ turn)
    dense = [each.apply(unit, each.values).flatten(1) for each in (kron, turned)]
    assert cases.relative(dense[1], dense[0]) < 1e-12
