"""What an import costs, and who may import whom."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ritz

SOURCE = Path(ritz.__file__).parent
HEAVY = ("torch", "numpy", "scipy", "matplotlib", "sklearn", "pandas")

# Who may import whom when loaded, a package counting as one. Each row names rows above it only; an import inside
# a function, for figures and reports, is free. Not every row above is allowed: optim knows no measures, random matrix
# theory knows no networks, and nothing but `python -m ritz` knows the command line.
RESULTS = "errors intervals storage results"
ALLOWED = {
    "errors": "",
    "memory": "errors",
    "provenance": "",
    "files": "",
    "nonfinite": "",
    "reading": "errors",
    "schema": "errors",
    "locks": "reading schema",
    "pickled": "errors reading",
    "storage": "errors files reading schema",
    "intervals": "errors storage",
    "results": "errors intervals storage",
    "pulse": "errors",
    "comm": "errors pulse",
    "loaders": "errors",
    "reducers": "errors comm",
    "space": "errors comm",
    "tables": "errors",
    "loggers": "errors nonfinite reading tables",
    "stopping": "errors",
    "workers": "memory stopping",
    "checkpoint": "errors reading files locks storage comm stopping",
    "runs": "errors provenance nonfinite reading schema files storage tables loggers",
    "switches": "",
    "sameness": "",
    "replay": "errors memory switches",
    "held": "errors memory sameness",
    "partition": "errors",
    "compilation": "errors switches partition",
    "shortcuts": "replay held compilation",
    "convolutions": "errors",
    "plan": RESULTS,
    "captures": "errors space",
    "layers": "errors captures",
    "batches": "errors memory comm loaders reducers space plan",
    "losses": "errors memory space batches",
    "shares": "errors comm batches",
    "sharded": "errors memory comm batches space",
    "weights": "errors sameness sharded",
    "weight_norms": "",
    "normalisations": "",
    "modes": "errors space batches weight_norms weights",
    "diagnoses": "errors memory reducers batches",
    "soundness": "errors memory reducers batches diagnoses modes",
    "walks": "errors memory comm reducers shortcuts batches shares sharded weights diagnoses",
    "risk": f"{RESULTS} comm reducers space sameness shortcuts plan losses captures batches shares sharded modes "
    "diagnoses soundness weights walks",
    "linearity": "errors reducers batches captures risk",
    "operators": f"{RESULTS} memory comm reducers space switches sameness held compilation convolutions plan losses "
    "captures layers batches risk",
    "fingerprints": "errors checkpoint batches risk operators",
    "krylov": f"{RESULTS} checkpoint stopping comm space plan operators fingerprints",
    "estimators": f"{RESULTS} memory checkpoint stopping fingerprints comm reducers space switches plan losses "
    "captures layers batches risk linearity operators krylov",
    "rmt": RESULTS,
    "measures": f"{RESULTS} checkpoint stopping fingerprints tables comm reducers space plan losses captures batches "
    "modes weights risk linearity operators krylov estimators rmt weight_norms",
    "transforms": "measures",
    "doctor": "errors memory storage tables reducers batches risk linearity operators estimators measures",
    "landscape": f"{RESULTS} tables comm reducers space plan losses batches weights risk operators krylov estimators",
    "optim": f"{RESULTS} loggers comm reducers space switches sameness replay convolutions plan losses captures "
    "batches sharded weight_norms normalisations modes risk operators krylov estimators rmt",
    "models": "errors batches",
    "papers": f"{RESULTS} checkpoint fingerprints pickled provenance nonfinite reading schema files locks tables "
    "loggers models modes reducers switches space workers plan losses batches risk operators krylov estimators rmt "
    "measures landscape optim",
    "report": f"{RESULTS} files reading schema tables loggers runs rmt estimators measures landscape papers",
    "integrations": f"{RESULTS} tables loggers comm space plan losses batches risk operators estimators measures "
    "doctor optim report",
    "testing": f"{RESULTS} comm reducers space plan losses batches risk operators krylov estimators rmt optim",
    "cli": f"{RESULTS} memory stopping checkpoint provenance reading tables loggers runs plan losses risk operators "
    "krylov estimators rmt measures doctor landscape optim papers report integrations testing workers",
    "__main__": "cli",
}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(result.stdout.splitlines()[-1]))


def imports_on_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when the module is loaded: not in functions, not for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_on_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from imports_on_load(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from imports_on_load(handler.body)


def targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> set[str]:
    """The modules below `ritz` that a statement names, by the row they belong to; "" is ritz as a whole."""
    if isinstance(node, ast.Import):
        paths = [alias.name.split(".") for alias in node.names]
    else:
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        paths = [[*base, alias.name] for alias in node.names]
    inside = [path[1:2] for path in paths if path[0] == "ritz" and path[1:] != ["__version__"]]
    homes = [ritz._HOME.get(name, f"ritz.{name}") for name in ("".join(part) for part in inside)]
    return {home.split(".")[1] for home in homes}


def violations(text: str, path: str) -> list[str]:
    """Every import in the source `text` of the file at `path` (within src/ritz) that the table does not allow."""
    parts = path.removesuffix(".py").split("/")
    unit, package = parts[0], ["ritz", *parts[:-1]]
    if unit not in ALLOWED and unit != "__init__":
        return [f"{path}: no row of the table in tests/test_imports.py says what {unit!r} may import; add one"]
    allowed = {unit, *ALLOWED.get(unit, "").split()}
    return [
        f"{path}:{node.lineno}: {unit} may not import {f'ritz.{target}' if target else 'ritz as a whole'} when loaded; "
        f"it may import {', '.join(sorted(allowed - {unit})) or 'nothing'}"
        for node in imports_on_load(ast.parse(text).body)
        for target in sorted(targets(node, package))
        if target not in allowed
    ]


def test_importing_ritz_loads_nothing_heavy():
    assert loaded_by("import ritz; ritz.__version__; dir(ritz)").isdisjoint(HEAVY)


def test_help_on_the_command_line_does_not_load_torch():
    run = "import sys; sys.argv = ['ritz', '--help']\nfrom ritz.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert loaded_by(run).isdisjoint({"torch", "matplotlib", "sklearn"})


def test_imports_go_upward_in_the_table_only():
    found = [
        line
        for path in sorted(SOURCE.rglob("*.py"))
        for line in violations(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix())
    ]
    assert not found, "\n" + "\n".join(found)


def test_each_row_of_the_table_names_rows_above_it():
    above: set[str] = set()
    for unit, allowed in ALLOWED.items():
        assert set(allowed.split()) <= above, f"{unit} would import {set(allowed.split()) - above} from below"
        above.add(unit)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("from ritz.risk import Risk", "space.py"),
        ("from ritz import Risk", "space.py"),  # by its public name
        ("from ritz import risk", "space.py"),
        ("import ritz.measures.audit", "optim/kfac.py"),
        ("from ..measures import audit", "optim/kfac.py"),
        ("import ritz", "operators/base.py"),
        ("try:\n    from ritz.cli import main\nexcept ImportError:\n    pass", "report/html.py"),
        ("class A:\n    from ritz.estimators import trace", "krylov/lanczos.py"),
        ("import math", "utils.py"),  # no row
        ("from ritz.risk import Risk", "__init__.py"),
    ],
)
def test_an_import_from_below_is_found(text, path):
    assert len(violations(text, path)) == 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("from ritz.risk import Risk", "operators/base.py"),
        ("from .base import Operator", "operators/hessian.py"),
        ("from ..risk import Risk", "operators/hessian.py"),
        ("from ritz import __version__", "results.py"),
        ("def f():\n    from ritz.report import figures", "results.py"),
        ("if TYPE_CHECKING:\n    from ritz.risk import Risk", "space.py"),
        ("import torch", "space.py"),
    ],
)
def test_an_import_from_above_is_allowed(text, path):
    assert violations(text, path) == []


def test_the_public_names_are_the_same_in_the_table_for_type_checkers_and_in_all():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If)).body
    homes = {alias.name: node.module for node in checked if isinstance(node, ast.ImportFrom) for alias in node.names}
    parents = {name: path.rpartition(".")[0] for name, path in ritz._SUBMODULES.items()}
    assert homes == {**ritz._HOME, **parents}
    assert set(ritz.__all__) == {*homes, "__version__"}
    assert set(ritz.__all__) <= set(dir(ritz))


@pytest.mark.parametrize("name", sorted(ritz._HOME))
def test_a_public_name_is_the_object_of_its_module(name):
    assert getattr(ritz, name) is getattr(importlib.import_module(ritz._HOME[name]), name)


@pytest.mark.parametrize("name", ritz._SUBMODULES)
def test_a_public_submodule_is_reached_by_name(name):
    assert getattr(ritz, name) is importlib.import_module(ritz._SUBMODULES[name])


def test_a_function_is_not_shadowed_by_the_module_it_lives_in():
    importlib.import_module("ritz.estimators.trace")
    importlib.import_module("ritz.krylov.solve")
    assert callable(ritz.trace)
    assert callable(ritz.solve)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'hessain'"):
        ritz.hessain  # noqa: B018
