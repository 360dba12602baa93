"""Bounds on the error, and the quantities that they use."""

from functools import partial

from ...results import Estimate
from .. import pacbayes
from ..row import EVERY, NONE, Measure
from ..subject import Subject
from .sharpness import DEVIATION, prior_shift


def _metric_a(s: Subject, convention: pacbayes.MetricConvention) -> Estimate:
    return pacbayes.metric_a(s.spectrum.trace, s.weight_norm, s.risk.dim, convention=convention)


def _sigma(s: Subject, adaptive: bool = False) -> Estimate:
    name = "adaptive sigma search" if adaptive else "sigma search"
    run = partial(pacbayes.sigma_search, s.risk, adaptive=adaptive, seed=s.settings.seed, progress=s.report)
    return s.once(name, lambda: s.searched(name, run))


ROWS = (
    Measure(
        key="metric_a", formula="||w|| / 2 + Tr H / P", convention="as the tables of seed 002 have it: not squared",
        source="seed 002, tables 1 to 6", family="PAC-Bayes", cost="Hessian", standard=True,
        compute=lambda s: _metric_a(s, "table"), reading="nearly half the norm of the weights: the trace hardly counts",
    ),
    Measure(
        key="metric_a_eq7", formula="Tr H + ||w||^2 / 2", convention="as equation 7 has it: squared",
        source="seed 002, equation 7", family="PAC-Bayes", cost="Hessian", standard=True,
        compute=lambda s: _metric_a(s, "eq7"), reading="bounds the KL of the paper up to constants; changes with scale",
    ),
    Measure(
        key="metric_a_minibatch", formula="||w|| / 2 + Tr H_b / P", convention="one batch of 128; error over samples",
        source="seed 002, section 4.2", family="PAC-Bayes", cost="backward", gradients=0.1,
        compute=lambda s: pacbayes.minibatch_metric(s.risk, seed=s.settings.seed),
        reading="metric a at the cost of one training step",
    ),
    Measure(
        key="kl_eq6", formula="(Tr G + ||w||^2) / (2 sigma^2) + log det(G + shift) / 2", source="seed 002, equation 6",
        convention="as printed, with shift = 1 / (N sigma^2): not a KL divergence", family="PAC-Bayes", cost="GGN",
        compute=lambda s: pacbayes.kl_eq6(s.ggn_spectrum, s.weight_norm, s.settings.sigma, shift=prior_shift(s)),
        reading="can be negative; use laplace_kl",
    ),
    Measure(
        key="risk_eq8", formula="-N L + (P / 2) log 2 pi - log det(G + shift) / 2", source="seed 002, equation 8",
        convention="as printed, with shift = 1 / (N sigma^2)", family="PAC-Bayes", cost="GGN", better="higher",
        compute=lambda s: pacbayes.empirical_risk_eq8(s.ggn_spectrum, s.loss, s.num_items, shift=prior_shift(s)),
        reading="an evidence, not the expectation that it stands for",
    ),
    Measure(
        key="metric_g", formula="-N L - (1 + 1/N) log det(G + shift) / 2 - (Tr G + ||w||^2) / (2 sigma^2 N)",
        source="seed 002, equation 9", convention="as printed, with shift = 1 / (N sigma^2)", family="PAC-Bayes",
        cost="GGN", better="higher",
        compute=lambda s: pacbayes.metric_g_eq9(
            s.ggn_spectrum, s.loss, s.weight_norm, s.num_items, s.settings.sigma, shift=prior_shift(s)
        ),
        reading="the paper prints no value of it",
    ),
    Measure(
        key="laplace_kl", formula="(||w||^2 / sigma^2 + sum log(1 + c l_i) - sum c l_i / (1 + c l_i)) / 2",
        convention="c = N sigma^2, l_i eigenvalues of G; never negative",
        source="MacKay 1992; corrects seed 002, equation 6",
        family="PAC-Bayes", cost="GGN",
        compute=lambda s: pacbayes.laplace_kl(s.ggn_spectrum, s.weight_norm, s.num_items, s.settings.sigma),
        reading="how far the data moved the posterior from the prior, in nats",
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
        reading="how much noise the predictions tolerate",
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
        key="pacbayes_mag_orig", formula="sqrt((KL / 2 + log(N / sigma) + 10) / N), noise in proportion to |w_i|",
        convention="KL from the best isotropic prior around 0", source="Jiang et al. 2020, equation 57",
        family="PAC-Bayes", cost="search",
        compute=lambda s: pacbayes.pacbayes_mag_orig(_sigma(s, adaptive=True), s.weights, s.risk.num_samples),
        reading="a bound up to constants, vacuous above 1",
    ),
    Measure(
        key="pacbayes_mag_init", formula="the same, noise in proportion to |w_i - w_0i|",
        convention="KL from the best isotropic prior around the start of training",
        source="Jiang et al. 2020, equation 56", family="PAC-Bayes", cost="search", needs=frozenset({"init"}),
        unchanged=NONE,
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
)  # fmt: skip
