"""What the page on integrations shows runs with the real packages, where they are installed."""

from pathlib import Path

import pytest
from test_docs import python_blocks, run

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_the_blocks_that_need_a_package_run_with_it(package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = PAGE.read_text(encoding="utf-8")
    assert f"<!-- needs {package} -->" in text
    script = tmp_path / "integrations.py"
    script.write_text(python_blocks(text, package), encoding="utf-8")
    run(script, tmp_path)
