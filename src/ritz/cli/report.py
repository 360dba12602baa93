"""`ritz report`: a run folder as one HTML page."""

import json
import sys
from pathlib import Path


def run(folder: Path, out: Path | None = None, as_json: bool = False) -> int:
    """The whole command; returns the exit status."""
    from ..report import of_run
    from ..report.page import check_target

    target = folder / "report.html" if out is None else out
    try:
        if target.is_dir():
            raise ValueError(f"{target} is a folder: name a file with --out, such as {target / 'page.html'}")
        page = of_run(folder)
        check_target(target)
        try:
            written = page.write(target)
        except OSError as error:
            why = error.strerror or str(error)
            raise ValueError(f"cannot write {target}: {why}; name another file with --out") from error
    except (OSError, ValueError) as error:
        print(f"ritz report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    size = written.stat().st_size
    print(json.dumps({"page": str(written), "bytes": size}) if as_json else f"wrote {written} ({size / 1000:.0f} kB)")
    return 0
