"""What pyproject.toml allows is what the tests have run with: constraints/oldest.txt, by `make oldest`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_oldest_versions_that_are_allowed_are_those_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["demo"], *extras["plot"], *extras["study"]]
    lines = (ROOT / "constraints" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("#")[0].split("==") for line in lines if "==" in line.split("#")[0])
    for need in needs:
        name, oldest = re.fullmatch(r"([\w-]+)>=([\d.]+)", need).groups()
        if name != "torch":
            assert re.fullmatch(rf"{re.escape(oldest)}(\.0)*", pinned[name].strip()), need
