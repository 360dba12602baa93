"""Training with curvature: preconditioners, damping rules, averaging, schedules, a curvature penalty."""

from .adam import Gadam, GadamX
from .averaging import IterateAverage
from .damping import AutoDamping
from .diagnostics import (
    Preconditioned,
    bulk_share,
    direction_rates,
    rate_ratio,
    reduction_ratio,
    sgd_rate,
    stable_rate,
)
from .directions import adam_inverse_root
from .kfac import KFAC
from .lanczos_opt import LanczosOpt
from .log import TrainingLog
from .penalty import TracePenalty
from .rules import BulkEdge, Constant, DampingRule, LedoitWolf, LevenbergMarquardt, NoiseVariance, Seen
from .schedules import PiecewiseLinear, averaging_decay, linear_decay, ramp_decay
from .streaming import Stream

__all__ = [
    "KFAC",
    "AutoDamping",
    "BulkEdge",
    "Constant",
    "DampingRule",
    "Gadam",
    "GadamX",
    "IterateAverage",
    "LanczosOpt",
    "LedoitWolf",
    "LevenbergMarquardt",
    "NoiseVariance",
    "PiecewiseLinear",
    "Preconditioned",
    "Seen",
    "Stream",
    "TracePenalty",
    "TrainingLog",
    "adam_inverse_root",
    "averaging_decay",
    "bulk_share",
    "direction_rates",
    "linear_decay",
    "ramp_decay",
    "rate_ratio",
    "reduction_ratio",
    "sgd_rate",
    "stable_rate",
]
