"""Many runs in one table: rank correlations over all runs, and along each hyper-parameter."""

from .axes import Granulated, Information, SignError, conditional_information, granulated_tau, sign_error
from .correlation import (
    Correlation,
    MarginCorrelations,
    PointCorrelations,
    kendall,
    margin_correlations,
    pearson,
    spearman,
    without_outliers,
)
from .ranking import Study, StudyRow, holm, study

__all__ = [
    "Correlation",
    "Granulated",
    "Information",
    "MarginCorrelations",
    "PointCorrelations",
    "SignError",
    "Study",
    "StudyRow",
    "conditional_information",
    "granulated_tau",
    "holm",
    "kendall",
    "margin_correlations",
    "pearson",
    "sign_error",
    "spearman",
    "study",
    "without_outliers",
]
