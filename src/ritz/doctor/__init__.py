"""Before a long run: is the problem sound, which way of taking products is fastest, how long, how much memory?"""

from .checkup import Checkup, Finding, Projection, Trial
from .examination import examine

__all__ = ["Checkup", "Finding", "Projection", "Trial", "examine"]
