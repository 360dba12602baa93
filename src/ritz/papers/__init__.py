"""The papers' experiments, each with what it measured."""
