"""The one table of measures. `ritz.measure`, the audit, comparisons, the docs page and the tests are made from it.

In it H is the Hessian of the mean training loss without a penalty, G the Gauss-Newton matrix, P the number of
parameters, N of samples, w the weights, S the softmax of the outputs f. A measure of one's own is a `Measure` as these
are, and goes into the list that `ritz.measure` is given.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import replace

from ..estimators.trace import trace
from ..intervals import StudentT
from ..operators.gauss_newton import GGN
from ..results import Estimate, affine, derived
from ..tables import Table
from . import gap, margins, norms, pacbayes, sharpness
from .row import EVERY, NONE, ORDER, SAME_FUNCTION, Measure
from .sharpness.ascent import Norm
from .subject import Subject


def resolve(measures: str | Measure | Sequence[str | Measure]) -> list[Measure]:
    """The rows that "standard", "all", or a list of keys and measures stands for.

    Example:
        >>> [measure.key for measure in resolve(["trace"])], len(resolve("standard"))
        (['trace'], 24)
    """
    if measures == "all":
        return list(MEASURES.values())
    if measures == "standard":
        return [measure for measure in MEASURES.values() if measure.standard]
    asked = [measures] if isinstance(measures, str | Measure) else list(measures)
    if not asked:
        raise ValueError("no measure is chosen: the list is empty")
    rows = [measure if isinstance(measure, Measure) else _known(measure) for measure in asked]
    if len({row.key for row in rows}) < len(rows):
        raise ValueError(f"two measures have one key: {', '.join(row.key for row in rows)}")
    return rows


def _known(key: str) -> Measure:
    if key in MEASURES:
        return MEASURES[key]
    near = difflib.get_close_matches(str(key), [*MEASURES, "standard", "all"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "ritz.measures.MEASURES lists them"
    raise ValueError(f"no measure is named {key!r}; {hint}")


def catalogue(family: str | None = None) -> Table:
    """The table of measures as text, of one family or of all.

    Example:
        >>> catalogue("norms").rows[0][:2]
        ('weight_norm *', '||w||')
    """
    header = ("measure", "formula", "convention", "source", "run", "unchanged by")
    rows = []
    for row in MEASURES.values():
        if family in (None, row.family):
            run = f"{row.cost}, needs {' and '.join(sorted(row.needs))}" if row.needs else row.cost
            key = f"{row.key} *" if row.standard else row.key
            kept = _INVARIANCE.get(row.unchanged) or ", ".join(sorted(row.unchanged))
            rows.append((key, row.formula, row.convention, row.source, run, kept))
    return Table(header, rows, notes=("* in the standard set",))


_INVARIANCE = {EVERY: "all", SAME_FUNCTION: "all that keep the function", ORDER: "permute", NONE: "none"}


def _table(*rows: Measure) -> dict[str, Measure]:
    found = {row.key: row for row in rows}
    assert len(found) == len(rows), "two measures have one name"
    return found


# ------------------------------------------------------------------------------------ how rows are computed


def _train(s: Subject, what: gap.What) -> Estimate:
    if what == "loss" and s.risk.opaque:  # the mean is known even where the outputs are not
        return Estimate(name="train loss", value=s.loss, exact=True, convention="mean loss, training data")
    return gap.on_training_data(s.outputs, what)


def _test(s: Subject, what: gap.What) -> Estimate:
    if what == "loss" and s.test is not None and s.test.opaque:  # a mean, but not of how many independent items
        text = "mean loss, test data; no error bar, since an opaque loss is not known item by item"
        value = s.once("test loss", s.test.loss)
        return Estimate(name="test loss", value=value, stderr=math.nan, rule=StudentT(0), convention=text)
    return s.once(f"test {what}", lambda: gap.on_test_data(s.test_outputs, what, seed=s.settings.seed))


def _gap(s: Subject, what: gap.What) -> Estimate:
    return gap.gap(_train(s, what), _test(s, what))


def _effective_rank(s: Subject) -> Estimate:
    run = s.spectrum
    return derived(
        "effective rank", lambda trace, square: trace**2 / square if square else 0.0, run.trace, run.moment(2),
        support=(0.0, float(run.dim)), convention=f"(Tr H)^2 / Tr H^2; {run.convention}",
    )  # fmt: skip


def _per_parameter(s: Subject, estimate: Estimate, name: str) -> Estimate:
    return affine(estimate, 1 / s.risk.dim, name=name, convention=f"divided by P = {s.risk.dim}: {estimate.convention}")


def _scaled_sharpness(s: Subject) -> Estimate:
    top, square = s.spectrum.lambda_max, s.weight_norm**2
    told = {"name": "scaled sharpness", "convention": f"times ||w||^2: {top.convention}"}
    return affine(top, square, **told) if square else Estimate(value=0.0, exact=True, **told)  # type: ignore[arg-type]


def _lambda_min(s: Subject) -> Estimate:
    """The smallest eigenvalue; one that is only round-off is 0, and not the sign of a saddle."""
    run = s.spectrum
    found, noise = run.lambda_min, ROUND_OFF * run.noise * float(run.spectral_norm.value)
    return replace(found, value=0.0) if found.exact and abs(float(found.value)) <= noise else found


def _metric_a(s: Subject, convention: pacbayes.MetricConvention) -> Estimate:
    return pacbayes.metric_a(s.spectrum.trace, s.weight_norm, s.risk.dim, convention=convention)


def _layer_spectra(s: Subject) -> norms.LayerSpectra:
    return s.once("layer spectra", lambda: norms.layer_spectra(s.risk))


def _spectral_norms(s: Subject) -> Estimate:
    return s.once("layer norms", lambda: norms.spectral_norms(s.risk))


def _sigma(s: Subject, adaptive: bool = False) -> Estimate:
    name = "adaptive sigma search" if adaptive else "sigma search"
    run = pacbayes.sigma_search
    return s.once(name, lambda: run(s.risk, adaptive=adaptive, seed=s.settings.seed, progress=s.report))


def _prior_shift(s: Subject) -> float:
    """1 / (N sigma^2), the precision of the prior for each sample."""
    return 1 / (s.num_items * s.settings.sigma**2)


def _worst(s: Subject, rho: float, norm: Norm = "l2", **options: bool | int) -> Estimate:
    run = sharpness.worst_case_sharpness
    return run(s.risk, rho, norm=norm, seed=s.settings.seed, progress=s.report, **options)  # type: ignore[arg-type]


def _normalised(s: Subject) -> Estimate:
    flat = sharpness.logit_normalised(s.risk)
    return sharpness.worst_case_sharpness(flat, ADAPTIVE_RHO, adaptive=True, seed=s.settings.seed, progress=s.report)


# --------------------------------------------------------------------------------------------- the table

EPSILON = 1e-3  # Keskar et al. 2017
SUBSPACE = 100  # the same
RHO = 0.05  # Foret et al. 2021
ADAPTIVE_RHO = 0.5  # Kwon et al. 2021
RHO_MAX = 1e-3  # in l-infinity; Andriushchenko et al. 2023 go from here
M = 128  # samples of a batch for m-sharpness
DEVIATION = 0.01  # of each coordinate, or relative to it, for average-case sharpness
ROUND_OFF = 64  # an eigenvalue below so many times the noise of a product, relative to the norm, is not told from 0

MEASURES = _table(
    # ---------------------------------------------------------------------------------------------- gap
    Measure(
        key="train_loss", formula="mean_i loss_i", convention="training data, no penalty", source="seeds 000, 002",
        family="gap", cost="forward", compute=lambda s: _train(s, "loss"), standard=True, better=None,
        unchanged=SAME_FUNCTION, reading="how well the data is fitted; sharpness compares only at equal loss",
    ),
    Measure(
        key="train_error", formula="share of i with margin_i <= 0", convention="a share, not percent; a tie is wrong",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _train(s, "error"), standard=True,
        better=None, unchanged=EVERY, reading="0 means that all training labels are fitted",
    ),
    Measure(
        key="test_loss", formula="mean_i loss_i", convention="test data; bootstrap interval", source="seeds 000, 002",
        family="gap", cost="forward", compute=lambda s: _test(s, "loss"), standard=True, needs=frozenset({"test"}),
        unchanged=SAME_FUNCTION, reading="the outcome itself; grows with confidence in wrong answers",
    ),
    Measure(
        key="test_error", formula="share of i with margin_i <= 0", convention="a share; binomial interval",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _test(s, "error"), standard=True,
        needs=frozenset({"test"}), unchanged=EVERY, reading="the outcome itself",
    ),
    Measure(
        key="gap_loss", formula="test loss - train loss", convention="train value exact, test value a sample",
        source="seed 002, tables 1 to 6", family="gap", cost="forward", compute=lambda s: _gap(s, "loss"),
        standard=True, needs=frozenset({"test"}), unchanged=SAME_FUNCTION,
        reading="what the measures below are meant to predict",
    ),
    Measure(
        key="gap_error", formula="test error - train error", convention="a share, not percentage points",
        source="seeds 000, 002", family="gap", cost="forward", compute=lambda s: _gap(s, "error"), standard=True,
        needs=frozenset({"test"}), unchanged=EVERY, reading="what the measures below are meant to predict",
    ),
    # -------------------------------------------------------------------------------------------- norms
    Measure(
        key="weight_norm", formula="||w||", convention="Euclidean, not squared; all chosen parameters",
        source="seed 000, figure 1c", family="norms", cost="weights", compute=lambda s: norms.weight_norm(s.risk),
        standard=True, reading="small after weight decay; with BatchNorm part of it changes nothing",
    ),
    Measure(
        key="distance", formula="||w - w_0||", convention="Euclidean, not squared", source="Neyshabur et al. 2017",
        family="norms", cost="weights", compute=lambda s: norms.distance(s.risk, s.start), standard=True,
        unchanged=NONE, needs=frozenset({"init"}), reading="how far training went from its start",
    ),
    Measure(
        key="weight_max", formula="max_i |w_i|", convention="largest entry", source="seed 000, figure 1c",
        family="norms", cost="weights", compute=lambda s: norms.weight_norm(s.risk, math.inf),
        reading="one large weight decides it",
    ),
    Measure(
        key="log_spectral_product", formula="sum_l log ||A_l||^2", convention="A_l the layer as a linear map",
        source="Jiang et al. 2020", family="norms", cost="weights", unchanged=SAME_FUNCTION,
        compute=lambda s: norms.log_spectral_product(s.risk, _spectral_norms(s)),
        reading="bounds the logarithm of the squared Lipschitz constant of a chain",
    ),
    Measure(
        key="stable_ranks", formula="sum_l ||A_l||_F^2 / ||A_l||^2", convention="A_l the layer as a matrix",
        source="Neyshabur et al. 2018", family="norms", cost="weights", compute=lambda s: norms.stable_ranks(s.risk),
        unchanged=EVERY, reading="about how many directions the layers use",
    ),
    Measure(
        key="spectral_complexity", formula="prod_l ||A_l|| (sum_l (||A_l'||_{2,1} / ||A_l||)^(2/3))^(3/2)",
        convention="reference 0, not divided by a margin", source="Bartlett et al. 2017, equation 1.2", family="norms",
        cost="weights", compute=lambda s: norms.spectral_complexity(s.risk), unchanged=SAME_FUNCTION,
        reading="a margin bound when divided by the margin; loose on deep networks",
    ),
    Measure(
        key="path_norm", formula="sqrt(sum over paths of prod w^2)", convention="squared weights, biases too",
        source="Neyshabur et al. 2015", family="norms", cost="weights", compute=lambda s: norms.path_norm(s.risk),
        unchanged=SAME_FUNCTION, reading="a norm of the function's paths, blind to where a factor sits",
    ),
    Measure(
        key="layer_alpha", formula="exponent of the tail of eig(W'W)",
        convention="mean over layers, maximum likelihood",
        source="Martin and Mahoney 2021", family="norms", cost="weights", compute=lambda s: _layer_spectra(s).alpha,
        unchanged=EVERY, reading="2 to 6 is called well trained; needs layers with many eigenvalues",
    ),
    Measure(
        key="layer_alpha_hat", formula="alpha log10 lambda_max(W'W)", convention="mean over layers",
        source="Martin et al. 2021", family="norms", cost="weights", compute=lambda s: _layer_spectra(s).alpha_hat,
        reading="the exponent weighed by the scale of the layer",
    ),
    Measure(
        key="layer_spikes", formula="eigenvalues of W'W above the Marchenko-Pastur edge", convention="mean over layers",
        source="Martin and Mahoney 2021", family="norms", cost="weights", better=None, unchanged=EVERY,
        compute=lambda s: _layer_spectra(s).num_spikes, reading="0 for a layer of noise",
    ),
    # ---------------------------------------------------------------------------------------- sharpness
    Measure(
        key="trace", formula="Tr H", convention="sum of eigenvalues, not divided by P", source="seed 000, section 1",
        family="sharpness", cost="Hessian", compute=lambda s: s.spectrum.trace, standard=True,
        reading="small is called flat; moves with every rescaling",
    ),
    Measure(
        key="trace_per_param", formula="Tr H / P", convention="the mean eigenvalue", source="seed 000, appendix C",
        family="sharpness", cost="Hessian", standard=True,
        compute=lambda s: _per_parameter(s, s.spectrum.trace, "trace per parameter"),
        reading="what the columns 'Tr H' of seeds 000 and 002 hold; compare only at equal P",
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
        reading="what the columns 'Tr H^2' and 'Frobenius norm' of the seeds hold",
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
        source="Neyshabur et al. 2017, section 2.2", family="sharpness", cost="Hessian", compute=_scaled_sharpness,
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
        compute=lambda s: sharpness.layer_spectral_norms(s.hessian, seed=s.settings.seed, progress=s.report),
        reading="which layer is sharp: see the parts",
    ),
    Measure(
        key="ggn_trace", formula="Tr G", convention="not divided by P", source="seed 002, section 6",
        family="sharpness", cost="backward", gradients=10.0,
        compute=lambda s: trace(GGN(s.risk), seed=s.settings.seed),
        reading="equals Tr H for piecewise-linear networks",
    ),
    Measure(
        key="ggn_lambda_max", formula="lambda_1(G)", convention="largest eigenvalue of G", source="seed 000",
        family="sharpness", cost="GGN", compute=lambda s: s.ggn_spectrum.lambda_max,
        reading="the part of lambda_1 that the outputs make",
    ),
    Measure(
        key="soft_rank", formula="Tr G (G + I / (N sigma^2))^-1",
        convention="effective dimension of the Laplace posterior",
        source="Maddox et al. 2020", family="sharpness", cost="GGN",
        compute=lambda s: s.ggn_spectrum.soft_rank(_prior_shift(s)),
        reading="how many directions the data has fixed against the prior",
    ),
    Measure(
        key="shifted_logdet", formula="log det(G + I / (N sigma^2))", convention="natural logarithm",
        source="seed 002, equation 6, made finite", family="sharpness", cost="GGN",
        compute=lambda s: s.ggn_spectrum.logdet(_prior_shift(s)),
        reading="log volume; without the shift it is minus infinity",
    ),
    Measure(
        key="relative_flatness", formula="sum_{s,t} <w_s, w_t> Tr H_st", convention="last linear layer, rows w_s",
        source="Petzka et al. 2021", family="sharpness", cost="search", gradients=40.0, unchanged=SAME_FUNCTION,
        compute=lambda s: sharpness.relative_flatness(s.risk, seed=s.settings.seed),
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
        source="Foret et al. 2021", family="sharpness", cost="search", gradients=45.0,
        compute=lambda s: _worst(s, RHO), reading="what SAM minimises, searched with 20 steps",
    ),
    Measure(
        key="worst_case_linf", formula="max_{|d_i| <= rho} L(w + d) - L(w)", convention=f"rho = {RHO_MAX}",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=45.0,
        compute=lambda s: _worst(s, RHO_MAX, "linf"), reading="the same in a box",
    ),
    Measure(
        key="m_sharpness", formula="mean over batches of max_{||d|| <= rho} L_b(w + d) - L_b(w)",
        source="Foret et al. 2021",
        convention=f"rho = {RHO}, batches of {M}, one step", family="sharpness", cost="search", gradients=2.0,
        compute=lambda s: _worst(s, RHO, steps=1, batch_size=min(M, s.risk.num_samples)),
        reading="sharpness as a training batch sees it; grows as the batch shrinks",
    ),
    Measure(
        key="worst_case_adaptive", formula="max_{||d / |w| || <= rho} L(w + d) - L(w)",
        convention=f"rho = {ADAPTIVE_RHO}, l2",
        source="Kwon et al. 2021", family="sharpness", cost="search", gradients=45.0, unchanged=SAME_FUNCTION,
        compute=lambda s: _worst(s, ADAPTIVE_RHO, adaptive=True), reading="relative to each weight: blind to rescaling",
    ),
    Measure(
        key="worst_case_adaptive_linf", formula="max_{|d_i| <= rho |w_i|} L(w + d) - L(w)",
        convention=f"rho = {DEVIATION}",
        source="Andriushchenko et al. 2023", family="sharpness", cost="search", gradients=45.0, unchanged=SAME_FUNCTION,
        compute=lambda s: _worst(s, DEVIATION, "linf", adaptive=True), reading="the same in a box",
    ),
    Measure(
        key="normalised_sharpness", formula="the adaptive worst case with f / ||f|| for f",
        source="Andriushchenko et al. 2023",
        convention=f"rho = {ADAPTIVE_RHO}, l2; logits centred and of norm 1", family="sharpness", cost="search",
        gradients=45.0, unchanged=EVERY, compute=_normalised, reading="blind to the scale of the outputs too",
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
    # ---------------------------------------------------------------------------------------- PAC-Bayes
    Measure(
        key="metric_a", formula="||w|| / 2 + Tr H / P", convention="as the tables of seed 002 have it: not squared",
        source="seed 002, tables 1 to 6", family="PAC-Bayes", cost="Hessian", standard=True,
        compute=lambda s: _metric_a(s, "table"), reading="nearly half the norm of the weights: the trace hardly counts",
    ),
    Measure(
        key="metric_a_eq7", formula="Tr H + ||w||^2 / 2", convention="as equation 7 has it: squared",
        source="seed 002, equation 7", family="PAC-Bayes", cost="Hessian", standard=True,
        compute=lambda s: _metric_a(s, "eq7"), reading="bounds the KL of the paper up to constants; moves with scale",
    ),
    Measure(
        key="metric_a_minibatch", formula="||w|| / 2 + Tr H_b / P", convention="one batch of 128; error over samples",
        source="seed 002, section 5", family="PAC-Bayes", cost="backward", gradients=0.1,
        compute=lambda s: pacbayes.minibatch_metric(s.risk, seed=s.settings.seed),
        reading="metric a at the cost of one training step",
    ),
    Measure(
        key="kl_eq6", formula="(Tr G + ||w||^2) / (2 sigma^2) + log det(G + shift) / 2", source="seed 002, equation 6",
        convention="as printed, with shift = 1 / (N sigma^2): not a KL divergence", family="PAC-Bayes", cost="GGN",
        compute=lambda s: pacbayes.kl_eq6(s.ggn_spectrum, s.weight_norm, s.settings.sigma, shift=_prior_shift(s)),
        reading="can be negative; use laplace_kl",
    ),
    Measure(
        key="risk_eq8", formula="-N L + (P / 2) log 2 pi - log det(G + shift) / 2", source="seed 002, equation 8",
        convention="as printed, with shift = 1 / (N sigma^2)", family="PAC-Bayes", cost="GGN", better="higher",
        compute=lambda s: pacbayes.empirical_risk_eq8(s.ggn_spectrum, s.loss, s.num_items, shift=_prior_shift(s)),
        reading="an evidence, not the expectation that it stands for",
    ),
    Measure(
        key="metric_g", formula="-N L - (1 + 1/N) log det(G + shift) / 2 - (Tr G + ||w||^2) / (2 sigma^2 N)",
        source="seed 002, equation 9", convention="as printed, with shift = 1 / (N sigma^2)", family="PAC-Bayes",
        cost="GGN", better="higher",
        compute=lambda s: pacbayes.metric_g_eq9(
            s.ggn_spectrum, s.loss, s.weight_norm, s.num_items, s.settings.sigma, shift=_prior_shift(s)
        ),
        reading="the paper prints no value of it",
    ),
    Measure(
        key="laplace_kl", formula="(||w||^2 / sigma^2 + sum log(1 + c l_i) - sum c l_i / (1 + c l_i)) / 2",
        convention="c = N sigma^2, l_i eigenvalues of G; never negative",
        source="MacKay 1992; corrects seed 002, equation 6",
        family="PAC-Bayes", cost="GGN",
        compute=lambda s: pacbayes.laplace_kl(s.ggn_spectrum, s.weight_norm, s.num_items, s.settings.sigma),
        reading="what the data has moved the posterior from the prior, in nats",
    ),
    Measure(
        key="laplace_evidence", formula="-N L - ||w||^2 / (2 sigma^2) - sum log(1 + c l_i) / 2",
        convention="c = N sigma^2, nats",
        source="MacKay 1992", family="PAC-Bayes", cost="GGN", better="higher",
        compute=lambda s: pacbayes.laplace_evidence(
            s.ggn_spectrum, s.loss, s.weight_norm, s.num_items, s.settings.sigma
        ),
        reading="log marginal likelihood; compare models by differences",
    ),
    Measure(
        key="expected_loss", formula="E L(w + u), u ~ N(0, 0.01^2 I)", convention="sampled, antithetic pairs",
        source="seed 002, left side of equation 8", family="PAC-Bayes", cost="search", gradients=10.0,
        compute=lambda s: pacbayes.expected_loss(s.risk, DEVIATION, seed=s.settings.seed, progress=s.report),
        reading="the loss of the network with noisy weights",
    ),
    Measure(
        key="sigma", formula="largest sigma with E accuracy(w + sigma u) >= accuracy - 0.1",
        convention="isotropic noise",
        source="Jiang et al. 2020", family="PAC-Bayes", cost="search", gradients=80.0, better="higher", compute=_sigma,
        reading="how much noise the predictions stand",
    ),
    Measure(
        key="sigma_adaptive", formula="the same with noise sigma |w_i|", convention="relative noise",
        source="Jiang et al. 2020", family="PAC-Bayes", cost="search", gradients=80.0, better="higher", unchanged=EVERY,
        compute=lambda s: _sigma(s, adaptive=True), reading="the same in units of each weight",
    ),
    Measure(
        key="pacbayes_flatness", formula="1 / sigma^2", convention="isotropic noise", source="Jiang et al. 2020",
        family="PAC-Bayes", cost="search", compute=lambda s: pacbayes.pacbayes_flatness(_sigma(s)),
        reading="small is called flat",
    ),
    Measure(
        key="pacbayes_orig", formula="sqrt((||w||^2 / (4 sigma^2) + log(N / sigma) + 10) / N)", convention="from 0",
        source="Jiang et al. 2020, equation 49", family="PAC-Bayes", cost="search",
        compute=lambda s: pacbayes.pacbayes_orig(_sigma(s), s.weights, s.risk.num_samples),
        reading="a bound up to constants, vacuous above 1",
    ),
    Measure(
        key="pacbayes_init", formula="sqrt((||w - w_0||^2 / (4 sigma^2) + log(N / sigma) + 10) / N)",
        convention="from the start of training", source="Jiang et al. 2020, equation 48", family="PAC-Bayes",
        cost="search", needs=frozenset({"init"}), unchanged=NONE,
        compute=lambda s: pacbayes.pacbayes_init(_sigma(s), s.weights, s.start, s.risk.num_samples),
        reading="a bound up to constants, vacuous above 1",
    ),
    Measure(
        key="pacbayes_mag_orig", formula="the same, noise and prior in proportion to |w_i|", convention="from 0",
        source="Jiang et al. 2020, equation 57", family="PAC-Bayes", cost="search",
        compute=lambda s: pacbayes.pacbayes_mag_orig(_sigma(s, adaptive=True), s.weights, s.risk.num_samples),
        reading="a bound up to constants, vacuous above 1",
    ),
    Measure(
        key="pacbayes_mag_init", formula="the same, noise and prior in proportion to |w_i - w_0i|",
        convention="from the start of training", source="Jiang et al. 2020, equation 56", family="PAC-Bayes",
        cost="search", needs=frozenset({"init"}), unchanged=NONE,
        compute=lambda s: pacbayes.pacbayes_mag_init(
            _sigma(s, adaptive=True), s.weights, s.start, s.risk.num_samples
        ),
        reading="a bound up to constants, vacuous above 1",
    ),
    Measure(
        key="certificate", formula="kl^-1(error of N(w, sigma^2 I), (KL + ln ...) / N)", convention="holds with 94 %",
        source="Dziugaite and Roy 2017", family="PAC-Bayes", cost="search", gradients=40.0, needs=frozenset({"init"}),
        unchanged=NONE,
        compute=lambda s: pacbayes.certificate(
            s.risk, s.start, sigma=_sigma(s), seed=s.settings.seed, progress=s.report
        ),
        reading="a true bound on the error of the noisy network; 1 says nothing",
    ),
    # ------------------------------------------------------------------------------------------ margins
    Measure(
        key="margin_median", formula="median_i (f_y - max_{j != y} f_j)", convention="signed, outputs",
        source="seed 003, section 2", family="margins", cost="forward", standard=True, better="higher",
        compute=lambda s: margins.margin_quantile(s.outputs, 0.5), unchanged=SAME_FUNCTION,
        reading="half of the samples have more; grows with the scale of the outputs",
    ),
    Measure(
        key="margin_q10", formula="10 % quantile of f_y - max_{j != y} f_j", convention="signed, outputs",
        source="Jiang et al. 2019", family="margins", cost="forward", standard=True, better="higher",
        compute=lambda s: margins.margin_quantile(s.outputs, 0.1), unchanged=SAME_FUNCTION,
        reading="a tenth of the samples have less; negative: a tenth is wrong",
    ),
    Measure(
        key="margin_skewness", formula="E (m - E m)^3 / Var^(3/2)", convention="population, signed output margins",
        source="seed 003, section 4.2", family="margins", cost="forward", standard=True, better=None,
        compute=lambda s: margins.margin_skewness(s.outputs), unchanged=EVERY,
        reading="negative: a tail of small margins",
    ),
    Measure(
        key="aceht", formula="mean_i (||x_i||^2 + 1) (1 - sum_j S_ij^2)", convention="x the input as the model gets it",
        source="seed 003, proposition 3.1", family="margins", cost="forward", standard=True,
        compute=lambda s: margins.aceht(s.outputs), unchanged=SAME_FUNCTION,
        reading="the trace if the network were affine; 0 where it is sure, right or wrong",
    ),
    Measure(
        key="margin_bound", formula="mean_i (||x_i||^2 + 1) (1 - gamma_i^2)", convention="gamma the softmax margin",
        source="seed 003, section 3.2", family="margins", cost="forward", standard=True,
        compute=lambda s: margins.margin_bound(s.outputs), unchanged=SAME_FUNCTION,
        reading="bounds aceht from above; small when softmax margins are near 1",
    ),
    Measure(
        key="margin_mean", formula="mean_i (f_y - max_{j != y} f_j)", convention="signed, outputs",
        source="seed 003, section 2", family="margins", cost="forward", better="higher", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.margin_mean(s.outputs), reading="grows with the scale of the outputs",
    ),
    Measure(
        key="margin_min", formula="min_i (f_y - max_{j != y} f_j)", convention="signed, outputs",
        source="seed 003, section 4.2", family="margins", cost="forward", better="higher", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.margin_min(s.outputs), reading="one sample decides it; positive if all are right",
    ),
    Measure(
        key="softmax_margin_median", formula="median_i (S_y - max_{j != y} S_j)", convention="signed, softmax",
        source="seed 003, section 2", family="margins", cost="forward", better="higher", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.margin_quantile(s.outputs, 0.5, which="softmax"), reading="saturates at 1",
    ),
    Measure(
        key="inverse_margin", formula="1 / (10 % quantile of the margin)^2", convention="exists for positive quantiles",
        source="Jiang et al. 2020", family="margins", cost="forward", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.inverse_margin(s.outputs), reading="small for confident networks",
    ),
    Measure(
        key="layer_margin", formula="(f_y - f_j) / (||grad_h (f_y - f_j)|| spread(h))", source="Jiang et al. 2019",
        convention="mean over layers of the median; j the runner-up", family="margins", cost="backward", gradients=2.0,
        better="higher", unchanged=EVERY, compute=lambda s: margins.layer_margins(s.risk, progress=s.report).median,
        reading="distance to the boundary in units of the spread of the layer",
    ),
    Measure(
        key="aceht_features", formula="mean_i (||h_i||^2 + 1) (1 - sum_j S_ij^2)",
        convention="h the input of the last layer",
        source="seed 003, proposition 3.1", family="margins", cost="forward",
        unchanged=frozenset({"batchnorm", "permute"}),
        compute=lambda s: margins.aceht_features(s.risk), reading="exactly the trace of the last layer's block of H",
    ),
    Measure(
        key="confidence", formula="mean_i max_j S_ij", convention="training data", source="seed 003, section 3.1",
        family="margins", cost="forward", better=None, compute=lambda s: margins.mean_confidence(s.outputs),
        unchanged=SAME_FUNCTION, reading="how sure the network is, right or wrong",
    ),
    Measure(
        key="entropy", formula="mean_i -sum_j S_ij log S_ij", convention="training data, nats",
        source="Pereyra et al. 2017", family="margins", cost="forward", better=None, unchanged=SAME_FUNCTION,
        compute=lambda s: margins.mean_entropy(s.outputs), reading="0 for a network that is sure of everything",
    ),
    Measure(
        key="calibration_error", formula="sum_b |accuracy - confidence| n_b / N", convention="training data, 15 bins",
        source="Guo et al. 2017", family="margins", cost="forward", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.calibration_error(s.outputs), reading="0 when confidence is as good as it says",
    ),
)  # fmt: skip
