"""The first ten minutes, as the README and docs/commands.md have them: real commands, typed in a clean folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
RITZ = Path(sys.executable).parent / "ritz"
QUICK = ("--num-steps", "20", "--num-probes", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Clean, and the same for all steps."""
    return tmp_path_factory.mktemp("newcomer")


def typed(folder: Path, *words: str | Path) -> str:
    """What a program of Python prints; it must end well, and say nothing on stderr but what matplotlib has of fonts."""
    return said(programs.run(folder, *words, COLUMNS="100"))


def typed_anew(folder: Path, *words: str | Path) -> str:
    """The same from a new interpreter."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    words = (sys.executable, *words)
    return said(subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120))


def said(done: subprocess.CompletedProcess[str]) -> str:
    errors = [line for line in done.stderr.splitlines() if not line.startswith("findfont")]
    assert (done.returncode, errors) == (0, []), done.stderr
    return done.stdout


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_command_is_a_module_too(folder):
    assert typed_anew(folder, "-m", "ritz", "--version") == typed(folder, RITZ, "--version")


def test_the_demo_ends_with_a_page(folder):
    out = typed(folder, RITZ, "demo", "--epochs", "3")
    assert out.splitlines()[-1] == "open ritz-demo/report.html in a browser"
    page = (folder / "ritz-demo" / "report.html").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    for sentence in json.loads((folder / "ritz-demo" / "table.json").read_text(encoding="utf-8"))["findings"]:
        assert sentence.split(":")[0] in page
    assert not re.search(r"(?:src|href)=\"https?:", page)  # nothing is fetched


def test_the_lines_of_the_readme_run_on_an_own_model(folder):
    lines = blocks("README.md")[0].replace("32", "12").replace("num_steps=50", "num_steps=20")  # a smaller one
    out = typed_anew(folder, "-c", lines)
    assert re.match(r"trace \S+ \+- \S+\n\(", out)
    assert (folder / "spectrum.png").read_bytes().startswith(b"\x89PNG")


def test_three_checkpoints_are_compared_and_the_page_shows_them(folder):
    (folder / "study.py").write_text("\n\n".join(blocks("docs/commands.md")[:2]), encoding="utf-8")
    typed(folder, folder / "study.py")
    weights = [f"{name}.safetensors" for name in "abc"]
    assert all((folder / name).exists() for name in weights)
    words = ("study.py:make_risk", "--weights", *weights, "--test", "study.py:make_test_risk", *QUICK)
    out = typed(folder, RITZ, "compare", *words)
    assert "prefers" in out
    assert "`ritz report ritz-runs/compare-1` makes a page of it" in out
    assert "wrote ritz-runs/compare-1/report.html" in typed_anew(folder, RITZ, "report", "ritz-runs/compare-1")
    page = (folder / "ritz-runs" / "compare-1" / "report.html").read_text(encoding="utf-8")
    assert "3 solutions of one problem" in page
    assert "gap_loss" in page
