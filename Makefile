# `make test` and `make demo` need nothing but Python 3.11 or newer: they make .venv, install into it, and run.

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only. The constraints go with every call, so that no later one replaces torch.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints/ci.txt
READY := .venv/.ready
DEV := .venv/.ready-dev
SITE := .venv/.ready-docs

.PHONY: help demo test test-slow oldest faults fuzz check lint types format bench bench-gpu docs install integrations clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       the main job on a small data set: a table and a page, in under a minute"
	@echo "make test       the tests, doctests included, that take seconds"
	@echo "make test-slow  the tests that take minutes"
	@echo "make oldest     the tests with the oldest versions of packages that are allowed, in .venv-oldest"
	@echo "make faults     kills at 200 moments, full disks, lost ranks: what is survived, into docs/faults.md"
	@echo "make fuzz       12,000 damaged files for every reader"
	@echo "make check      lint + types + test, what must pass before a change goes in"
	@echo "make lint       ruff: rules and format;    make format  mends what can be mended"
	@echo "make types      mypy, strict, on src"
	@echo "make bench      the benchmarks in their quick form"
	@echo "make bench-gpu SUITE=products   one suite of benchmarks/speed.py on a GPU, with peers"
	@echo "make docs       the pages and the reference as a site, in build/docs"
	@echo "make integrations   Lightning, transformers, TensorBoard: tests that need them are skipped without"
	@echo "make install    only make .venv;           make clean   remove it and all caches"

demo: $(READY)
	$(BIN)/ritz demo

# Two at a time, about as long each: what runs programs (pages, examples, commands, experiments, ranks, kills),
# optimisers and doctests, beside all other tests.
PROGRAMS := tests/test_docs.py tests/test_pages.py tests/cli tests/papers tests/report tests/integrations tests/optim \
  tests/distributed tests/faults src/ritz
test: $(DEV)
	@$(BIN)/python -m pytest $(PROGRAMS) > .pytest-programs.log 2>&1 & programs=$$!; \
	$(BIN)/python -m pytest tests $(foreach path,$(filter tests/%,$(PROGRAMS)),--ignore=$(path)); status=$$?; \
	wait $$programs || status=$$?; cat .pytest-programs.log; rm -f .pytest-programs.log; exit $$status

test-slow: $(DEV)
	$(BIN)/python -m pytest -m slow --timeout=1800

# In an environment of its own, without the packages that results are compared with: their tests are skipped.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip
	.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -c constraints/oldest.txt \
	  $$(grep '^torch==' constraints/ci.txt) -e '.[demo,study]' --group test
	.venv-oldest/bin/python -m pytest

faults: $(DEV)
	$(BIN)/python tests/faults/survey.py --kills 200 --out docs/faults.md

fuzz: $(DEV)
	RITZ_FUZZ=12000 $(BIN)/python -m pytest tests/fuzz --timeout=1800

check: lint types test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)
	@set -e; for file in $(wildcard benchmarks/*.py); do echo "$$file"; $(BIN)/python "$$file" --quick; done

SUITE ?= products
bench-gpu: $(DEV)
	$(BIN)/python benchmarks/speed.py $(SUITE) --device cuda --compile $(ARGS)

# A warning is an error: a link that leads nowhere, a page that nothing lists, a docstring that cannot be read.
docs: $(SITE)
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

install: $(DEV)

# Lightning, transformers and TensorBoard, for the tests of what plugs into them: a few hundred megabytes.
integrations: $(DEV)
	@$(INSTALL) --group integrations

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# What the package needs at run time. The version of pip is raised first: dependency groups came with pip 25.1.
$(READY): pyproject.toml constraints/ci.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "ritz needs Python 3.11 or newer, and " \
	  + sys.executable + " is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "installing into .venv (once; a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) pip
	@$(INSTALL) -e '.[demo]'
	@touch $@

# What tests and checks need besides.
$(DEV): $(READY) constraints/oracles.txt
	@$(INSTALL) --group test --group lint
	@$(INSTALL) --no-deps -r constraints/oracles.txt
	@touch $@

# What the site needs besides.
$(SITE): $(READY)
	@$(INSTALL) --group docs
	@touch $@
