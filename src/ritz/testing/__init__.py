"""Conformance checks for operators, estimators and optimisers, of ritz or of your own.

`check_operator` asks whether something behaves as one symmetric matrix, whichever way it is used; `check_estimator`
whether the error bars of a number mean what they say; `check_optimizer` whether an optimiser keeps to the manners of
torch.optim. All raise an AssertionError that names what failed and why, so they can stand in any test-suite.
"""

from .conventions import CHECKS
from .estimators import check_estimator
from .operators import DENSE_LIMIT, check_operator
from .optimizers import OptimizerReport, check_optimizer

__all__ = ["CHECKS", "DENSE_LIMIT", "OptimizerReport", "check_estimator", "check_operator", "check_optimizer"]
