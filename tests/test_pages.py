"""The pages of docs run and are complete; the demo's figure in them is small."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from test_docs import FENCE, python_blocks, run

import ritz
from ritz.estimators.quantities import Spectrum

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


@pytest.mark.parametrize(
    "path", [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")], ids=lambda p: p.name
)
def test_the_python_blocks_of_a_page_run(path, tmp_path):
    script = tmp_path / f"{path.stem}.py"
    script.write_text(python_blocks(path.read_text(encoding="utf-8")), encoding="utf-8")
    run(script, tmp_path)


def test_the_pictures_of_the_concepts_are_made_by_a_program(tmp_path):
    script = tmp_path / "concepts.py"  # it writes beside itself
    script.write_text((ROOT / "docs" / "concepts.py").read_text(encoding="utf-8"), encoding="utf-8")
    run(script, tmp_path)
    made, shown = tmp_path.glob("*.png"), (ROOT / "docs").glob("concepts_*.png")
    assert {path.name for path in made} == {path.name for path in shown}


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    missing = [target for target, _ in LINK.findall(text) if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_a_table_ends_at_an_empty_line(path):
    """What follows a row without one is shown as its next row."""
    lines = FENCE.sub("", path.read_text(encoding="utf-8")).splitlines()
    assert not [after for row, after in pairwise(lines) if row.startswith("|") and after and not after.startswith("|")]


def test_the_reference_names_everything_public():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\w+", text))
    modules = (ritz, ritz.operators, ritz.measures, ritz.transforms, ritz.rmt, ritz.optim)
    public = {name for module in modules for name in module.__all__}
    public |= set(ritz.landscape.__all__) - {"Interpolation", "Line", "Plane", "Joint", "Transform"}
    public -= {"Joint", "Transform"}
    own = {name for name, value in vars(Spectrum).items() if isinstance(value, property)}
    of_spectrum = {name for name in own if not name.startswith("_")}
    assert not (public | of_spectrum) - known - {"num_steps", "num_probes"}


@pytest.mark.parametrize("family", sorted({row.family for row in ritz.measures.MEASURES.values()}))
def test_the_page_of_measures_has_the_table_of_each_family(family):
    """Written from the registry: print(ritz.measures.catalogue(family).markdown())."""
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    assert ritz.measures.catalogue(family).markdown() in page


def test_the_page_of_measures_says_what_each_source_is():
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- (\w.*? \d{4}):", page, flags=re.MULTILINE))
    named = {re.match(r"[A-Z]\w+.*? (?:19|20)\d\d", row.source) for row in ritz.measures.MEASURES.values()}
    assert {found[0] for found in named if found} == listed


def test_the_number_of_measures_is_the_same_everywhere():
    number = str(len(ritz.measures.MEASURES))
    for name in ("README.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"(\d+) (?:measures|of them from one registry)", text)) == {number}


def test_the_picture_of_the_readme_is_small():
    picture = ROOT / "docs" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_in_percent_format(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert lines[0] == "# %% [markdown]"
    assert lines[1].startswith("# # ")
    assert re.search("truth|dense", "\n".join(lines[-16:])), "it ends with an estimate beside what is known to be true"
