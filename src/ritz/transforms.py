"""Other weights, the same function or the same predictions: `ritz.measures.transforms` by its public name."""

from .measures.transforms import *  # noqa: F403
from .measures.transforms import __all__ as __all__
