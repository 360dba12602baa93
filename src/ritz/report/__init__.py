"""Results as one self-contained HTML page, and figures."""

from .build import build
from .folder import of_run
from .page import Page, Section

__all__ = ["Page", "Section", "build", "of_run"]
