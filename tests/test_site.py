"""The pages make a site: all of them can be reached, every link leads somewhere, every public name has its place."""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_docs import FENCE, NOT_RUN, python_blocks
from torch import nn

import ritz

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")])
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def load_conf():
    """docs/conf.py as Sphinx would run it; it imports nothing of Sphinx."""
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


CONF = load_conf()


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The headings of a page as they are linked to."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(prose(path)))
    return set(words)


def reached(index: Path) -> set[Path]:
    """What the navigation lists, from one index page down."""
    pages = {index}
    for block in re.findall(r"```\{toctree\}\n(.*?)```", CONF.toctrees(index.read_text(encoding="utf-8")), re.DOTALL):
        for name in re.findall(r"^.+ <([\w/-]+)>$", block, re.MULTILINE):
            page = index.parent / f"{name}.md"
            pages |= reached(page) if page.name == "index.md" else {page}
    return pages


# ---------------------------------------------------------------------------------------- pages and links


def test_every_page_is_reached_from_the_index_and_nothing_else_is():
    assert reached(DOCS / "index.md") == set(PAGES)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_every_link_and_picture_of_a_page_is_there(path):
    broken = []
    for _, target in LINK.findall(prose(path)):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (path.parent / name) if name else path
        if not file.resolve().is_relative_to(ROOT) or not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_links_to_no_markdown_outside_of_docs(path):
    """The site could not follow: only pages and files to download are there."""
    outside = [
        target
        for _, target in LINK.findall(prose(path))
        if "://" not in target and ".md" in target and not (path.parent / target).resolve().is_relative_to(DOCS)
    ]
    assert not outside


def test_a_broken_link_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[there](#a-page) ![not](gone.png) [neither](#nor-this)\n", encoding="utf-8")
    assert [target for _, target in LINK.findall(prose(page))] == ["#a-page", "gone.png", "#nor-this"]
    assert anchors(page) == {"a-page"}


def test_the_pictures_of_the_concepts_are_small_and_all_there():
    """They are made by docs/concepts.py, which tests/test_pages.py runs."""
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    shown = {target for picture, target in LINK.findall(page) if picture}
    assert shown == {path.name for path in DOCS.glob("concepts_*.png")}
    assert all((DOCS / name).stat().st_size < 100_000 for name in shown)


def test_every_formula_can_be_set():
    mathml = pytest.importorskip("docutils.utils.math.latex2mathml", reason="docutils is not installed")
    found = [
        one or other
        for path in PAGES
        for one, other in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.sub("`[^`]*`", "", prose(path)), re.DOTALL)
    ]
    assert len(found) > 20
    for formula in found:
        assert "<math" in mathml.tex2mathml(formula)


def test_every_example_is_listed_with_a_line():
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[[^\]]+\]\(\.\./examples/([^)]+)\) \| (.+) \|$", page, re.MULTILINE))
    assert list(rows) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert len(rows) >= 8


# ---------------------------------------------------------------------------------------- reference


def test_every_public_name_of_ritz_has_a_place_in_the_reference():
    page = (DOCS / "api" / "ritz.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto(?:class|function):: ritz\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(ritz._HOME) & set(ritz.__all__))
    assert set(ritz.__all__) - set(shown) == {*ritz._SUBMODULES, "__version__"}


@pytest.mark.parametrize("name", sorted(ritz._SUBMODULES))
def test_every_module_of_ritz_has_a_page_that_leaves_out_only_what_is_elsewhere(name):
    page = (DOCS / "api" / f"{name}.md").read_text(encoding="utf-8")
    assert f".. automodule:: ritz.{name}\n" in page
    left_out = re.findall(r":exclude-members: (.*)", page)
    assert {word for row in left_out for word in row.split(", ")} <= set(ritz._HOME)


def test_docstrings_become_restructured_text():
    text = """The |sum| of `a*b`, of two `Table`s and of w_.

        s = sum_i |w_i|

    Again.

    Args:
        *rest: Any, as
            `f(x)` takes.

    Example:
        >>> 2 * 3  # not *this*
        6
    """
    lines = [line.removeprefix("    ") for line in text.rstrip().splitlines()]
    assert CONF.as_restructured(lines) == [
        r"The \|sum\| of ``a*b``, of two ``Table``\ s and of w\_.",
        *["", "::", "", "    s = sum_i |w_i|", "", "Again.", ""],
        *["Args:", r"    \*rest: Any, as", "        ``f(x)`` takes.", ""],
        *["Example:", "    >>> 2 * 3  # not *this*", "    6"],
    ]


# ---------------------------------------------------------------------------------------- other packages


@pytest.mark.oracle("curvlinops", "hessian_eigenthings", "pyhessian")
def test_the_blocks_for_those_who_come_from_elsewhere_give_what_their_packages_give():
    """In one process, since their imports take seconds; `tests/test_pages.py` runs our blocks as a reader would."""
    page = (DOCS / "migration.md").read_text(encoding="utf-8").replace(NOT_RUN, "")  # theirs as well
    page = page.replace("product = theirs @", "their_product = theirs @")
    page = page.replace("he.HessianOperator(model, loader", "he.HessianOperator(model, [(X, y)]")  # see Ragged batches
    names = {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyHessian's, of create_graph
        exec(compile(python_blocks(page), "migration.md", "exec"), names)
    dense = names["H"].dense()
    truth, trace = torch.linalg.eigvalsh(dense), float(dense.trace())
    assert names["values"][0] == pytest.approx(float(truth[-1]), rel=0.05)
    assert names["pairs"].values[0] == pytest.approx(float(truth[-1]), rel=1e-6)
    assert torch.allclose(names["their_product"], names["product"])
    assert torch.allclose(names["eigen"].eigenvalues, names["top"].values, rtol=1e-3)
    assert names["found"].estimate == pytest.approx(trace, rel=0.1)
    assert float(names["trace"]) == pytest.approx(trace, rel=0.1)
    assert not any(name.grad is not None for name in names["model"].parameters())


def small_problem():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        X, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), X, y


@pytest.mark.oracle("pyhessian")
def test_what_is_said_of_pyhessian_is_so():
    from pyhessian import hessian

    model, X, y = small_problem()
    loss = nn.CrossEntropyLoss()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # of create_graph
        negative = hessian(model.train(), lambda out, target: -loss(out, target), (X, y), cuda=False)
        assert not model.training
        assert len(negative.trace()) == 2
        with pytest.raises(RuntimeError, match="removed"):
            negative.density(iter=3)


@pytest.mark.oracle("hessian_eigenthings")
def test_what_is_said_of_hessian_eigenthings_is_so():
    import hessian_eigenthings as he

    model, X, y = small_problem()
    theirs = he.HessianOperator(model, [(X, y)], he.supervised_loss(nn.CrossEntropyLoss()))
    largest = float(torch.linalg.eigvalsh(ritz.Hessian(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))).dense())[-1])
    found, *_, converged = he.power_iteration_one(theirs, momentum=0.05, max_iter=500, tol=1e-7, seed=0)
    assert converged
    assert found == pytest.approx(largest - 0.05, rel=1e-3)
    normed = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    product = he.HessianOperator(normed, [(X, y)], he.supervised_loss(nn.CrossEntropyLoss()))
    product.matvec(torch.ones(product.size))
    assert normed[0].running_mean.abs().sum() > 0


@pytest.mark.oracle("curvlinops")
def test_what_is_said_of_curvlinops_is_so():
    import curvlinops as clo

    model, X, y = small_problem()
    params = list(model.parameters())
    with pytest.raises(AttributeError, match="reduction"):
        clo.HessianLinearOperator(model, nn.functional.cross_entropy, params, [(X, y)])
    normed = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    with pytest.raises(RuntimeError, match="in-place"):
        clo.HessianLinearOperator(normed, nn.CrossEntropyLoss(), list(normed.parameters()), [(X, y)])


# ---------------------------------------------------------------------------------------- the build


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: make docs")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees", DOCS, site]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "ritz.spectrum" in (site / "api" / "ritz.html").read_text(encoding="utf-8")
