"""The curvature of a neural network's loss: measured matrix-free, with error bars, and put to use.

A model, a loss and data make a `Risk`; a `Hessian` or another operator multiplies vectors by its curvature without
forming the matrix; one Lanczos run gives the spectrum and what follows from it, each number with its error.

    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> X, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3, 1)
    >>> risk = ritz.Risk(model, torch.nn.MSELoss(), (X, y))
    >>> H = ritz.Hessian(risk)  # (2 / 3) diag(1, 4, 9), here known in advance
    >>> H @ torch.ones(3)
    tensor([0.6667, 2.6667, 6.0000])
    >>> ritz.top_eigenpairs(H, k=1).values
    tensor([6.0000]...)
    >>> spectrum = ritz.spectrum(H, num_steps=3, num_probes=4, seed=0)
    >>> print(f"{float(spectrum.trace.value):.3f}")
    9.333

Nothing but this table is loaded at first: a name brings in its module, and with it torch, when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ritz import (
        doctor,
        errors,
        landscape,
        loggers,
        losses,
        measures,
        models,
        operators,
        optim,
        report,
        rmt,
        runs,
        testing,
        transforms,
    )
    from ritz.checkpoint import Checkpoint
    from ritz.estimators.blocks import BlockSpectra, block_spectra
    from ritz.estimators.diagonal import diagonal
    from ritz.estimators.noise import curvature_noise
    from ritz.estimators.quantities import Spectrum
    from ritz.estimators.samples import sample_traces
    from ritz.estimators.spectrum import spectrum
    from ritz.estimators.trace import frobenius_norm, logdet, trace
    from ritz.integrations.track import track
    from ritz.krylov.eigen import top_eigenpairs
    from ritz.krylov.solve import solve
    from ritz.losses import Loss
    from ritz.measures.audit import audit
    from ritz.measures.compare import compare
    from ritz.measures.measure import measure
    from ritz.measures.study import study
    from ritz.operators.base import Operator
    from ritz.operators.gauss_newton import GGN, EmpiricalFisher, Fisher, GradientCovariance
    from ritz.operators.hessian import Hessian
    from ritz.operators.kronecker import KFACOperator
    from ritz.plan import Plan
    from ritz.results import Estimate
    from ritz.risk import Risk
    from ritz.stopping import stoppable
    from ritz.storage import load

__version__ = "0.1.0"

__all__ = [
    "GGN",
    "BlockSpectra",
    "Checkpoint",
    "EmpiricalFisher",
    "Estimate",
    "Fisher",
    "GradientCovariance",
    "Hessian",
    "KFACOperator",
    "Loss",
    "Operator",
    "Plan",
    "Risk",
    "Spectrum",
    "__version__",
    "audit",
    "block_spectra",
    "compare",
    "curvature_noise",
    "diagonal",
    "doctor",
    "errors",
    "frobenius_norm",
    "landscape",
    "load",
    "logdet",
    "loggers",
    "losses",
    "measure",
    "measures",
    "models",
    "operators",
    "optim",
    "report",
    "rmt",
    "runs",
    "sample_traces",
    "solve",
    "spectrum",
    "stoppable",
    "study",
    "testing",
    "top_eigenpairs",
    "trace",
    "track",
    "transforms",
]

# Where each name lives. A test holds this table, `__all__` and the imports above to the same names.
_HOME = {
    "Risk": "ritz.risk",
    "Loss": "ritz.losses",
    "Plan": "ritz.plan",
    "Operator": "ritz.operators.base",
    "Hessian": "ritz.operators.hessian",
    "GGN": "ritz.operators.gauss_newton",
    "Fisher": "ritz.operators.gauss_newton",
    "EmpiricalFisher": "ritz.operators.gauss_newton",
    "GradientCovariance": "ritz.operators.gauss_newton",
    "KFACOperator": "ritz.operators.kronecker",
    "solve": "ritz.krylov.solve",
    "top_eigenpairs": "ritz.krylov.eigen",
    "spectrum": "ritz.estimators.spectrum",
    "Spectrum": "ritz.estimators.quantities",
    "block_spectra": "ritz.estimators.blocks",
    "BlockSpectra": "ritz.estimators.blocks",
    "trace": "ritz.estimators.trace",
    "frobenius_norm": "ritz.estimators.trace",
    "diagonal": "ritz.estimators.diagonal",
    "logdet": "ritz.estimators.trace",
    "sample_traces": "ritz.estimators.samples",
    "curvature_noise": "ritz.estimators.noise",
    "measure": "ritz.measures.measure",
    "compare": "ritz.measures.compare",
    "audit": "ritz.measures.audit",
    "study": "ritz.measures.study",
    "track": "ritz.integrations.track",
    "Estimate": "ritz.results",
    "load": "ritz.storage",
    "Checkpoint": "ritz.checkpoint",
    "stoppable": "ritz.stopping",
}
_SUBMODULES = {
    "doctor": "ritz.doctor",
    "errors": "ritz.errors",
    "landscape": "ritz.landscape",
    "loggers": "ritz.loggers",
    "losses": "ritz.losses",
    "measures": "ritz.measures",
    "models": "ritz.models",
    "operators": "ritz.operators",
    "optim": "ritz.optim",
    "report": "ritz.report",
    "rmt": "ritz.rmt",
    "runs": "ritz.runs",
    "testing": "ritz.testing",
    "transforms": "ritz.transforms",
}


def __getattr__(name: str) -> Any:
    """Load the module of a public name when the name is first used, and keep the name."""
    if name in _SUBMODULES:
        value = importlib.import_module(_SUBMODULES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(
            f"module 'ritz' has no attribute {name!r}; its public names are in ritz.__all__", name=name
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, and what Python itself keeps here."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
