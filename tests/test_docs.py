"""What the documentation shows, runs; what it states twice, agrees."""

import doctest
import inspect
import re
import tomllib
from functools import cached_property
from pathlib import Path

import programs
import pytest

import ritz

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCE = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
OWN = (property, cached_property, classmethod, staticmethod)
NOT_RUN = "<!-- not run -->"  # on a line of its own before a block that shows something which is not a program
NEEDS = re.compile(r"<!-- needs (\w+) -->$")  # before one that runs where a package is installed


def python_blocks(markdown: str, having: str = "") -> str:
    """The Python blocks of a page as one program in which every line keeps its number on the page.

    Those that need a package are left out, save those that need the one named.
    """
    lines = [""] * (markdown.count("\n") + 1)
    for block in FENCE.finditer(markdown):
        before = markdown[: block.start()]
        needs = NEEDS.search(before.rstrip())
        wanted = needs[1] == having if needs else not before.rstrip().endswith(NOT_RUN)
        if block[1] == "python" and wanted:
            first = before.count("\n") + 1
            code = block[2].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def run(script: Path, folder: Path) -> None:
    """Run a program as a reader would: in a process of its own, in an empty folder, without a screen."""
    result = programs.run(folder, script)
    assert result.returncode == 0, f"{script.name} failed:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("name", [name for name in sorted(ritz._HOME) if not inspect.ismodule(getattr(ritz, name))])
def test_every_public_class_and_function_has_an_example(name):
    """The examples themselves are run with the doctests of src."""
    thing = getattr(ritz, name)
    assert inspect.getdoc(thing), f"ritz.{name} has no docstring"
    tests = doctest.DocTestFinder(recurse=False).find(thing, name)
    examples = [example for test in tests for example in test.examples]
    shown = [example for example in examples if not example.options.get(doctest.SKIP)]
    assert any(example.want for example in shown), f"the docstring of ritz.{name} has no example with an answer"


@pytest.mark.parametrize("name", [name for name in sorted(ritz._HOME) if name[0].isupper()])
def test_every_public_method_of_a_public_class_is_documented(name):
    """An override may leave it to the method that it overrides."""
    members = inspect.getmembers_static(getattr(ritz, name), lambda m: isinstance(m, OWN) or inspect.isfunction(m))
    bare = [
        key
        for key, member in members
        if not key.startswith("_") and not inspect.getdoc(getattr(getattr(ritz, name), key))
    ]
    assert not bare, f"without a docstring: {', '.join(f'ritz.{name}.{key}' for key in bare)}"


def test_the_python_blocks_of_the_readme_run(tmp_path):
    script = tmp_path / "README.py"  # a traceback names the line of README.md
    script.write_text(python_blocks(README.read_text(encoding="utf-8")), encoding="utf-8")
    run(script, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_runs(path, tmp_path):
    run(path, tmp_path)


def test_blocks_keep_their_line_numbers_and_marked_ones_are_left_out():
    page = "# A page\n\n```python\na = 1\nb = a\n```\n\n```bash\nls\n```\n"
    page += f"{NOT_RUN}\n```python\nno program\n```\n```python\nc = b\n```\n"
    lines = python_blocks(page).splitlines()
    assert [(number, line) for number, line in enumerate(lines, start=1) if line] == [
        (number, line) for number, line in enumerate(page.splitlines(), start=1) if line in ("a = 1", "b = a", "c = b")
    ]


def test_blocks_that_need_a_package_run_with_it_alone():
    page = "```python\na = 1\n```\n\n<!-- needs torch -->\n```python\nb = a\n```\n"
    page += "\n<!-- needs jax -->\n```python\nc = a\n```\n"
    assert [line for line in python_blocks(page).splitlines() if line] == ["a = 1"]
    assert [line for line in python_blocks(page, "torch").splitlines() if line] == ["a = 1", "b = a"]


def test_a_program_that_fails_is_reported(tmp_path):
    script = tmp_path / "bad.py"
    script.write_text("\nraise ValueError('as meant')\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"line 2(.|\n)*as meant"):
        run(script, tmp_path)


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == ritz.__version__
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)[1] == (
        ritz.__version__
    )
