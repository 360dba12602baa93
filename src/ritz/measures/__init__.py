"""Generalisation measures: sharpness, margins, PAC-Bayes, norms; what moves them, and how to compare them."""

from .bounds import kl_bernoulli, kl_inverse, mcallester, pacbayes_flatness, seeger
from .margins import margin_distribution, sample_aceht
from .registry import MEASURES, catalogue
from .row import Measure
from .trace_study import margin_study
