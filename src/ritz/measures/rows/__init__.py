"""The rows of the table of measures, family by family; `registry.py` puts them together."""
