"""Generalisation measures: sharpness, margins, PAC-Bayes, norms; what moves them, and how to compare them."""
