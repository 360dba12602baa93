"""Measures of curvature, and of the loss near the solution."""

import math
from dataclasses import replace

from ...estimators.trace import trace
from ...operators.gauss_newton import GGN
from ...results import Estimate, affine, derived
from .. import sharpness
from ..row import EVERY, NONE, SAME_FUNCTION, Measure
from ..sharpness.ascent import Norm
from ..subject import Subject

EPSILON = 1e-3  # Keskar et al. 2017
SUBSPACE = 100  # the same
RHO = 0.05  # Foret et al. 2021
ADAPTIVE_RHO = 0.5  # Kwon et al. 2021
RHO_MAX = 1e-3  # in l-infinity; Andriushchenko et al. 2023 go from here
M = 128  # samples of a batch for m-sharpness
DEVIATION = 0.01  # of each coordinate, or relative to it, for average-case sharpness
ROUND_OFF = 64  # an eigenvalue below so many times the noise of a product, relative to the norm, is not told from 0


def _effective_rank(s: Subject) -> Estimate:
    run = s.spectrum
    total, square, bracket = run.trace, run.moment(2), None
    if total.bracket and square.bracket:  # products in few digits
        (left, right), (low, high) = (map(float, ends) for ends in (total.bracket, square.bracket))
        least, most = sorted((left**2, right**2))
        bracket = 0.0 if left < 0 < right else least / high, most / low if low > 0 else math.inf
    return derived(
        "effective rank", lambda total, square: total**2 / square if square else 0.0, total, square, bracket=bracket,
        support=(0.0, float(run.dim)), convention=f"(Tr H)^2 / Tr H^2; {run.convention}",
    )  # fmt: skip


def _per_parameter(s: Subject, estimate: Estimate, name: str) -> Estimate:
    return affine(estimate, 1 / s.risk.dim, name=name, convention=f"divided by P = {s.risk.dim}: {estimate.convention}")


def _scaled_sharpness(s: Subject) -> Estimate:
    top, square = s.spectrum.lambda_max, s.weight_norm**2
    told = {"name": "scaled sharpness", "convention": f"times ||w||^2: {top.convention}"}
    return affine(top, square, **told) if square else Estimate(value=0.0, exact=True, **told)  # type: ignore[arg-type]


def _lambda_min(s: Subject) -> Estimate:
    """The smallest eigenvalue; if it is only round-off, 0, so that it does not suggest a saddle."""
    run = s.spectrum
    found, noise = run.lambda_min, ROUND_OFF * run.noise * float(run.spectral_norm.value)
    return replace(found, value=0.0) if found.exact and abs(float(found.value)) <= noise else found


def prior_shift(s: Subject) -> float:
    """1 / (N sigma^2), the precision of the prior for each sample."""
    return 1 / (s.num_items * s.settings.sigma**2)


def _worst(s: Subject, rho: float, norm: Norm = "l2", **options: bool | int) -> Estimate:
    run = sharpness.worst_case_sharpness
    return run(s.risk, rho, norm=norm, seed=s.settings.seed, progress=s.report, **options)  # type: ignore[arg-type]


def _normalised(s: Subject) -> Estimate:
    flat = sharpness.logit_normalised(s.risk)
    return sharpness.worst_case_sharpness(flat, ADAPTIVE_RHO, adaptive=True, seed=s.settings.seed, progress=s.report)


ROWS = (
    Measure(
        key="trace", formula="Tr H", convention="sum of eigenvalues, not divided by P", source="seed 000, section 1",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.trace, standard=True,
        reading="small is called flat; changes with every rescaling",
    ),
    Measure(
        key="trace_per_param", formula="Tr H / P", convention="the mean eigenvalue", source="seed 000, appendix C",
        family="sharpness", cost="Hessian", standard=True,
        compute=lambda s: _per_parameter(s, s.spectrum.trace, "trace per parameter"),
        reading="the columns 'Tr H' of seeds 000 and 002; compare only at equal P",
    ),
    Measure(
        key="frobenius_norm", formula="||H||_F", convention="not squared", source="seed 000, section 1",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.frobenius_norm, standard=True,
        reading="weighs outliers more than the trace does",
    ),
    Measure(
        key="moment2", formula="Tr H^2", convention="squared Frobenius norm, not divided by P", source="seeds 000, 002",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.moment(2),
        reading="unbiased over probes, which the norm itself is not",
    ),
    Measure(
        key="moment2_per_param", formula="Tr H^2 / P", convention="squared norm, divided by P",
        source="seed 002, tables 1 to 6", family="sharpness", cost="Hessian", standard=True,
        compute=lambda s: _per_parameter(s, s.spectrum.moment(2), "second moment per parameter"),
        reading="the columns 'Tr H^2' and 'Frobenius norm' of the seeds",
    ),
    Measure(
        key="spectral_norm", formula="max |lambda|", convention="of H, either sign", source="seed 000, section 1",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.spectral_norm, standard=True,
        reading="the sharpest direction, up or down",
    ),
    Measure(
        key="lambda_max", formula="lambda_1", convention="largest eigenvalue of H", source="seeds 000, 002",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.lambda_max, standard=True,
        reading="gradient descent with step above 2 / lambda_1 diverges along it",
    ),
    Measure(
        key="lambda_min", formula="lambda_P", convention="smallest eigenvalue of H", source="seed 000, appendix B",
        family="sharpness", cost="Hessian", compute=_lambda_min, standard=True, better=None,
        reading="negative: a saddle, not a minimum",
    ),
    Measure(
        key="effective_rank", formula="(Tr H)^2 / Tr H^2", convention="of H; between 0 and P",
        source="participation ratio", family="sharpness", cost="Hessian", compute=_effective_rank, standard=True,
        better=None, reading="about how many directions carry the curvature",
    ),
    Measure(
        key="scaled_sharpness", formula="lambda_1 ||w||^2", convention="||w|| of all chosen parameters",
        source="Neyshabur et al. 2017, section 2.4", family="sharpness", cost="Hessian", compute=_scaled_sharpness,
        standard=True, reading="sharpness against the scale of the weights; not free of it layer by layer",
    ),
    Measure(
        key="taylor_average", formula="rho^2 Tr H / (2 P)", convention=f"rho = {RHO}; part 'worst': rho^2 lambda_1 / 2",
        source="seeds 000 and 002, equation 1, with its missing half", family="sharpness", cost="Hessian",
        compute=lambda s: sharpness.taylor_shift(s.spectrum, RHO),
        reading="mean rise of the loss on a sphere, by Taylor",
    ),
    Measure(
        key="epsilon_quadratic", formula="lambda_1 epsilon^2 / (2 (1 + L))", convention=f"epsilon = {EPSILON}, l2 ball",
        source="Dinh et al. 2017, section 2", family="sharpness", cost="Hessian",
        compute=lambda s: sharpness.epsilon_sharpness_quadratic(s.spectrum.lambda_max, s.loss, EPSILON),
        reading="epsilon-sharpness if the loss were quadratic",
    ),
    Measure(
        key="stability_limit", formula="2 / lambda_1", convention="a step size", source="seed 000, section 4",
        family="sharpness", cost="Hessian", compute=lambda s: sharpness.stability_limit(s.spectrum.lambda_max),
        better="higher", reading="the largest step that gradient descent can take here",
    ),
    Measure(
        key="top_log_product", formula="sum_{i <= 10} log lambda_i", convention="largest ten, positive ones only",
        source="Wu, Zhu and E 2017", family="sharpness", cost="search", gradients=500.0,
        compute=lambda s: sharpness.top_log_product(s.eigenpairs), reading="log volume across the steep directions",
    ),
    Measure(
        key="layer_spectral_norm", formula="max_l ||H_ll||", convention="diagonal blocks, module by module",
        source="per layer", family="sharpness", cost="search", gradients=300.0,
        compute=lambda s: sharpness.layer_spectral_norms(
            s.hessian, seed=s.settings.seed, progress=s.report, checkpoint=s.kept_search("layers")
        ),
        reading="which layer is sharp: see the parts",
    ),
    Measure(
        key="ggn_trace", formula="Tr G", convention="not divided by P", source="seed 002, section 6",
        family="sharpness", cost="backward", gradients=10.0,
        compute=lambda s: trace(GGN(s.risk), seed=s.settings.seed, checkpoint=s.kept_search("GGN trace")),
        reading="equals Tr H for piecewise-linear networks",
    ),
    Measure(
        key="ggn_lambda_max", formula="lambda_1(G)", convention="largest eigenvalue of G",
        source="that of H in seed 000", family="sharpness", cost="GGN", compute=lambda s: s.ggn_spectrum.lambda_max,
        reading="the part of lambda_1 due to the outputs",
    ),
    Measure(
        key="soft_rank", formula="Tr G (G + I / (N sigma^2))^-1",
        convention="effective dimension of the Laplace posterior",
        source="Maddox et al. 2020", family="sharpness", cost="GGN",
        compute=lambda s: s.ggn_spectrum.soft_rank(prior_shift(s)),
        reading="how many directions the data determine against the prior",
    ),
    Measure(
        key="shifted_logdet", formula="log det(G + I / (N sigma^2))", convention="natural logarithm",
        source="seed 002, equation 6, made finite", family="sharpness", cost="GGN",
        compute=lambda s: s.ggn_spectrum.logdet(prior_shift(s)),
        reading="log volume; without the shift it is minus infinity",
    ),
    Measure(
        key="relative_flatness", formula="sum_{s,t} <w_s, w_t> Tr H_st", convention="last linear layer, rows w_s",
        source="Petzka et al. 2021", family="sharpness", cost="search", gradients=40.0, unchanged=SAME_FUNCTION,
        compute=lambda s: sharpness.relative_flatness(
            s.risk, seed=s.settings.seed, checkpoint=s.kept_search("one layer")
        ),
        reading="curvature of one layer in units of its own weights",
    ),
    Measure(
        key="fisher_rao", formula="D^2 mean_i <S - e_y, f>^2", convention="D weight layers; squared norm",
        source="Liang et al. 2019", family="sharpness", cost="forward", unchanged=SAME_FUNCTION,
        compute=lambda s: sharpness.fisher_rao_norm(s.risk), reading="<w, F w> for networks without biases",
    ),
    Measure(
        key="epsilon_sharpness", formula="(max_box L - L) / (1 + L)",
        convention=f"epsilon = {EPSILON}; ratio, not times 100",
        source="Keskar et al. 2017, metric 2.1", family="sharpness", cost="search", gradients=30.0,
        compute=lambda s: sharpness.epsilon_sharpness(s.risk, EPSILON, seed=s.settings.seed, progress=s.report),
        reading="a lower bound, as far as L-BFGS-B climbs in ten steps",
    ),
    Measure(
        key="epsilon_sharpness_subspace", formula="the same in w + A y", source="Keskar et al. 2017, metric 2.1",
        convention=f"epsilon = {EPSILON}, A normal with {SUBSPACE} columns", family="sharpness", cost="search",
        gradients=30.0, unchanged=NONE,
        compute=lambda s: sharpness.epsilon_sharpness(
            s.risk, EPSILON, subspace=min(SUBSPACE, s.risk.dim), seed=s.settings.seed, progress=s.report
        ),
        reading="a random slice of the box, as the paper does for large networks",
    ),
    Measure(
        key="worst_case_l2", formula="max_{||d|| <= rho} L(w + d) - L(w)", convention=f"rho = {RHO}",
        source="Foret et al. 2021", family="sharpness", cost="search", gradients=49.0,
        compute=lambda s: _worst(s, RHO), reading="the quantity that SAM minimises, searched with 20 steps",
    ),
    Measure(
        key="worst_case_linf", formula="max_{|d_i| <= rho} L(w + d) - L(w)", convention=f"rho = {RHO_MAX}",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=49.0,
        compute=lambda s: _worst(s, RHO_MAX, "linf"), reading="the same in a box",
    ),
    Measure(
        key="m_sharpness", formula="mean over batches of max_{||d|| <= rho} L_b(w + d) - L_b(w)",
        source="Foret et al. 2021",
        convention=f"rho = {RHO}, batches of {M}, one step", family="sharpness", cost="search", gradients=2.0,
        compute=lambda s: _worst(s, RHO, steps=1, batch_size=min(M, s.risk.num_samples)),
        reading="sharpness for a training batch; grows as the batch shrinks",
    ),
    Measure(
        key="worst_case_adaptive", formula="max_{||d / |w| || <= rho} L(w + d) - L(w)",
        convention=f"rho = {ADAPTIVE_RHO}, l2",
        source="Kwon et al. 2021", family="sharpness", cost="search", gradients=49.0, unchanged=SAME_FUNCTION,
        compute=lambda s: _worst(s, ADAPTIVE_RHO, adaptive=True),
        reading="relative to each weight: invariant to rescaling",
    ),
    Measure(
        key="worst_case_adaptive_linf", formula="max_{|d_i| <= rho |w_i|} L(w + d) - L(w)",
        convention=f"rho = {DEVIATION}",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=49.0, unchanged=SAME_FUNCTION,
        compute=lambda s: _worst(s, DEVIATION, "linf", adaptive=True), reading="the same in a box",
    ),
    Measure(
        key="normalised_sharpness", formula="the adaptive worst case with f / ||f|| for f",
        source="Andriushchenko et al. 2023",
        convention=f"rho = {ADAPTIVE_RHO}, l2; logits centred and of norm 1", family="sharpness", cost="search",
        gradients=49.0, unchanged=EVERY, compute=_normalised, reading="invariant to the scale of the outputs, too",
    ),
    Measure(
        key="average_case", formula="E L(w + d) - L(w), d_i ~ N(0, rho^2)",
        convention=f"rho = {DEVIATION} for each weight",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=25.0,
        compute=lambda s: sharpness.average_case_sharpness(
            s.risk, DEVIATION, seed=s.settings.seed, progress=s.report
        ),
        reading="about rho^2 Tr H / 2",
    ),
    Measure(
        key="average_case_adaptive", formula="E L(w + d) - L(w), d_i ~ N(0, (rho w_i)^2)",
        convention=f"rho = {10 * DEVIATION}",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=25.0, unchanged=SAME_FUNCTION,
        compute=lambda s: sharpness.average_case_sharpness(
            s.risk, 10 * DEVIATION, adaptive=True, seed=s.settings.seed, progress=s.report
        ),
        reading="noise in proportion to each weight",
    ),
)  # fmt: skip
