"""Sub-sampled curvature: the closed form of its noise against every batch; traces of piecewise-linear networks."""

from itertools import combinations

import pytest
import torch

from ritz.papers import theory_sampling as sampling
from ritz.papers.theory_networks import dense_hessian, deviation


def brute(matrices, size):
    """Mean of Tr H_b^2 over every batch of a size, each mean of matrices formed."""
    batches = [matrices[list(b)].mean(0) for b in combinations(range(len(matrices)), size)]
    return torch.stack([b.square().sum() for b in batches]).mean()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_the_noise_of_a_batch_has_its_closed_form_at_any_size(size):
    risk, data = sampling._problem(6)
    each = sampling._each(risk, data, dense_hessian)
    whole = each.mean(0)
    noise = (6 - size) / (size * 5) * (each - whole).square().sum((1, 2)).mean()
    torch.testing.assert_close(brute(each, size), whole.square().sum() + noise)


def test_single_samples_average_to_the_whole():
    risk, data = sampling._problem(6)
    for matrix in sampling.MATRICES.values():
        assert deviation(sampling._each(risk, data, matrix).mean(0), matrix(risk)) < 1e-12


def test_the_noise_is_not_small_so_that_its_absence_would_be_seen():
    above = sampling.figure_2()[1]
    assert above.measured.value > 1.5 * above.expected


def test_disjoint_pairs_are_biased_by_what_a_finite_set_lacks():
    """Tr H_1 H_2 of disjoint batches has mean Tr H^2 - mean |H_i - H|^2 / (N - 1)."""
    risk, data = sampling._problem(6)
    each = sampling._each(risk, data, dense_hessian)
    truth = each.mean(0).square().sum() - (each - each.mean(0)).square().sum((1, 2)).mean() / 5
    disjoint = sampling.pairs_of_batches()[2]
    assert disjoint.measured == pytest.approx(float(truth), rel=1e-10)


def test_the_gauss_newton_trace_is_the_hessian_trace_up_to_round_off():
    same, different, _ = sampling.trace_is_that_of_the_ggn()
    assert same.measured < 1e-14
    assert different.measured > 0.1


def test_only_batch_statistics_or_a_smooth_activation_make_a_trace_negative():
    relu, normalised, smooth = sampling.negative_trace()
    assert relu.measured > 0
    assert normalised.measured < -1
    assert smooth.measured < -1
    assert "BatchNorm" in relu.evidence


def test_lanczos_steps_on_a_diagonal_give_a_tridiagonal_matrix_with_its_spectrum_in_the_end():
    values, start = torch.tensor([4.0, 2.0, 1.0, -3.0]), torch.full((4,), 0.5)
    T = sampling._tridiagonal(values, start, 4)
    torch.testing.assert_close(torch.tril(T, -2), torch.zeros(4, 4))
    torch.testing.assert_close(torch.linalg.eigvalsh(T), values.sort().values)
    assert float(T[0, 0]) == pytest.approx(1.0)  # v'Hv


def test_operations_of_a_step_are_those_of_its_products_of_matrices():
    # an affine layer: out = x W' and the gradient of W, 2 n a b each; the inputs need no gradient
    model, x, y = torch.nn.Linear(5, 4, bias=False), torch.ones(3, 5), torch.zeros(3, dtype=torch.long)
    assert sampling._operations(model, x, y, lambda loss, out: 0 * loss) == 2 * (2 * 3 * 5 * 4)
    assert model.weight.grad is None


def test_the_gauss_newton_matrix_has_no_negative_eigenvalue_and_a_residual_network_has_many_at_its_start():
    *_, definite = sampling.trace_is_that_of_the_ggn()
    (negative,) = sampling.residual_start()
    assert abs(definite.measured) < 1e-12
    assert negative.measured > 0.2


def test_a_residual_block_adds_its_branch_to_its_input():
    block, x = sampling._Residual(3, seed=0), torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(block(x) - x, block.branch(x))
