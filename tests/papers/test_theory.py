"""Every claim of the papers' theory has the verdict that docs/theory.md prints, whatever the reader's settings are."""

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ritz.papers import theory
from ritz.papers.base import Claim, claims_table

DOCS = Path(__file__).parents[2] / "docs"

# what the papers print and what is not so
REFUTED = Counter(
    {
        "seed 000, equation 1": 2,
        "seed 000, equation 3": 1,
        "seed 000, equation 4": 2,
        "seed 000, section 2": 1,
        "seed 000, section 1": 1,
        "seed 000, section 5, figure 7": 1,
        "seed 000, theorem 1": 1,
        "seed 000, theorem 1, its proof": 1,
        "seed 000, equation 18": 1,
        "seed 000, section 4": 1,
        "seed 000, appendix B": 1,
        "seed 000, equation 13": 1,
        "seed 000, after equation 13": 1,
        "seed 001, equation 19": 1,
        "seed 000, equation 11": 1,
        "seed 000, equation 12": 1,
        "seed 002, section 3.1, second remark": 1,
        "seed 002, abstract, section 4.2": 1,
        "seed 002, equation 6": 2,
        "seed 002, equation 7": 1,
        "seed 002, tables 1, 2, 4 and 5": 2,
        "seed 002, equation 8": 1,
        "seed 002, abstract, equation 7": 1,
        "seed 002, section 4": 1,
        "seed 002, section 6": 1,
        "seed 002, section 6, footnote 2": 1,
        "seed 003, appendix C.2": 1,
        "seed 003, section 3.1": 1,
        "seed 003, section 3.2": 1,
        "seed 003, section 5": 1,
        "seed 004, before equation 15": 1,
        "seed 004, section 2.1": 1,
        "seed 004, lemma 3": 1,
        "seed 004, algorithm 1": 1,
        "seed 004, equation 7": 1,
        "seed 004, theorem 4": 1,
        "seed 004, lemma 2, with the L of its proof": 1,
        "seed 004, lemma 2, proof": 1,
        "seed 004, theorem 1, proof": 1,
        "seed 004, section 8, after equation 18": 1,
        "seed 004, section 8, before equation 19": 1,
        "seed 004, equation 20": 1,
        "seed 004, section 8, after equation 20": 1,
        "ours, on seed 000, equation 2, after Dinh et al.": 1,
        "ours, on seed 002, equation 7": 1,
        "ours, on seed 002, equation 7, tables 1, 2, 4 and 5": 1,
        "ours, on seed 000, section 1": 1,
        "ours, on seed 000, section 1, quoting Wilson et al. (2017)": 1,
        "ours, on seed 000, equation 16": 1,
        "ours, on seed 002, section 4.2": 1,
        "ours, on seed 002, equation 8": 1,
        "ours, on seed 002, equation 9": 1,
        "ours, on seed 003, proposition 5.1": 1,
        "ours, on seed 004, equation 15": 1,
        "ours, on seed 004, algorithm 1": 1,
        "ours, on seed 004, section 8": 1,
    }
)


@pytest.fixture(scope="module")
def found():
    return theory.sections()


@pytest.fixture(scope="module")
def claims(found):
    return [claim for part in found.values() for claim in part]


def rows(text: str) -> list[tuple[str, str, str]]:
    """Source, claim and verdict of every row of the tables of a page."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in cells]
    return [(row[0], row[1], row[4]) for row in cells if row[0] not in ("source", "---")]


def test_the_committed_page_has_the_claims_and_verdicts_of_the_code(found):
    page = (DOCS / "theory.md").read_text(encoding="utf-8")
    made = theory.page(found)
    assert rows(page) == rows(made)
    assert len(rows(made)) == sum(map(len, found.values()))
    prose = [[line for line in text.splitlines() if not line.startswith(("|", "- "))] for text in (page, made)]
    assert prose[0] == prose[1]


def test_no_claim_is_left_open(claims):
    assert all(claim.verdict in ("holds", "refuted") for claim in claims)


def test_the_refuted_statements_are_these(claims):
    assert Counter(c.source for c in claims if c.verdict == "refuted") == REFUTED


def test_what_is_mended_holds(claims):
    mended = [claim for claim in claims if "corrected" in claim.where]
    assert len(mended) > 10
    assert all(claim.verdict == "holds" for claim in mended)


def test_every_claim_names_its_source_and_its_evidence(claims):
    for claim in claims:
        assert re.fullmatch(r"seed 00[0-4]", claim.paper)
        assert claim.text
        assert claim.evidence.endswith(".")
    assert len({(claim.paper, claim.where, claim.text) for claim in claims}) == len(claims)


def test_the_page_gives_the_evidence_of_every_refutation(found):
    page = theory.page(found)
    for claim in (claim for part in found.values() for claim in part):
        assert (claim.evidence in page) or claim.verdict == "holds"


def test_the_readme_counts_the_claims_of_the_papers_as_they_are(claims):
    text = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    number = Counter(claim.verdict for claim in claims if not claim.ours)
    said = f"of {number.total()} claims, corrected ones included, {number['holds']} hold and {number['refuted']} are"
    assert said in text


def test_a_claim_that_cannot_be_told_is_counted(found):
    first = next(iter(found))
    open_ = Claim(paper="seed 000", where="x", text="y", expected=0.0, measured=float("nan"), evidence="z.")
    page = theory.page({first: [open_]})
    assert "corrected ones included: 1, of which 0 hold and 0 are refuted, 1 are not decidable." in page
    assert "- **x**, not decidable: y. z." in page


def test_a_section_alone_is_as_among_all_and_progress_is_told(found):
    seen = []
    alone = theory.sections([theory.METRIC], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]
    assert alone == {theory.METRIC: found[theory.METRIC]}


def test_an_unknown_section_is_refused():
    with pytest.raises(ValueError, match="no section 'Seed 009'; there are: Seeds 000 and 001: flatness; "):
        theory.sections(["Seed 009"])


def test_the_sections_have_something_to_say():
    assert list(theory.READINGS) == list(theory.CHECKS)


def test_the_checks_do_not_depend_on_the_default_precision_nor_touch_a_generator(found):
    """All of those that draw networks, in the precision that a reader's interpreter has."""
    torch.set_default_dtype(torch.float32)
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()  # noqa: NPY002
    titles = [theory.FLATNESS, theory.METRIC, theory.MARGINS]
    again = theory.sections(titles)
    after = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.get_default_dtype() == torch.float32
    for title in titles:
        assert claims_table(again[title]) == claims_table(found[title])


def test_the_figure_of_the_page_is_small_and_drawn_by_the_code(tmp_path):
    figure = theory.draw()
    surface, paths, _ = figure.axes
    assert surface.get_xlabel() == "probability of class 1"
    assert len(paths.get_lines()) == 3
    assert paths.xaxis_inverted()
    figure.savefig(tmp_path / "theory.png", dpi=50)
    picture = DOCS / "theory.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000
