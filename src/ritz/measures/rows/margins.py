"""Measures of the outputs: margins and confidence."""

from .. import margins
from ..row import EVERY, SAME_FUNCTION, Measure

ROWS = (
    Measure(
        key="margin_median", formula="median_i (f_y - max_{j != y} f_j)", convention="signed, outputs",
        source="seed 003, section 2", family="margins", cost="forward", standard=True, better="higher",
        compute=lambda s: margins.margin_quantile(s.outputs, 0.5), unchanged=SAME_FUNCTION,
        reading="half of the samples have more; grows with the scale of the outputs",
    ),
    Measure(
        key="margin_q10", formula="10 % quantile of f_y - max_{j != y} f_j", convention="signed, outputs",
        source="Jiang et al. 2020", family="margins", cost="forward", standard=True, better="higher",
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
        reading="the trace if the network were affine; 0 for confident predictions, right or wrong",
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
        compute=lambda s: margins.margin_min(s.outputs), reading="depends on one sample; positive if all are right",
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
        unchanged=SAME_FUNCTION, reading="confidence of the network, right or wrong",
    ),
    Measure(
        key="entropy", formula="mean_i -sum_j S_ij log S_ij", convention="training data, nats",
        source="Pereyra et al. 2017", family="margins", cost="forward", better=None, unchanged=SAME_FUNCTION,
        compute=lambda s: margins.mean_entropy(s.outputs), reading="0 for a network that is fully confident",
    ),
    Measure(
        key="calibration_error", formula="sum_b |accuracy - confidence| n_b / N", convention="training data, 15 bins",
        source="Guo et al. 2017", family="margins", cost="forward", unchanged=SAME_FUNCTION,
        compute=lambda s: margins.calibration_error(s.outputs), reading="0 if confidence equals accuracy",
    ),
)  # fmt: skip
