"""The rows of the table of measures, by family; `registry.py` puts them together."""
