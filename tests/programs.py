"""Programs as a reader runs them, at no cost but their own: a process that has other packages loaded forks for each.

Loading torch and what goes with it takes longer than most programs of the documentation. Neither ritz nor anything of
the tests is loaded in that process: a program imports it as in a new interpreter, and finds its own `__main__`, folder,
arguments and environment, single precision, and random generators that nobody has drawn from.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LOADED = (
    "torch", "torch._decomp", "torch._dynamo", "torch.distributed", "torch.profiler", "scipy.sparse.linalg",
    "scipy.stats", "sklearn.datasets", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "safetensors.torch", "rich.console",
)  # fmt: skip
TIMEOUT = 110  # seconds; what takes longer is killed


def run(folder: Path, script: Path | str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python script words...` gives in a folder, without a screen and with one thread.

    One thread, since on a busy machine two of them wait for each other over matrices this small.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as kept:
        order: dict[str, Any] = {"words": [str(script), *words], "folder": str(folder), "kept": kept}
        order["environment"] = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", **environment}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        out, err = ((Path(kept) / name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(order["words"], status, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process, which ends when nobody can give orders any more."""
    server = subprocess.Popen(
        [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
    )  # fmt: skip
    atexit.register(server.communicate)
    return server


def _program(order: dict[str, Any]) -> None:
    """Become the program."""
    signal.alarm(TIMEOUT)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(order["kept"], name), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = order["words"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Orders are lines of JSON, answers exit statuses."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is loaded is not looked at, and so not copied, by the collector of a fork
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _end(_program, json.loads(line))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _end(act: Callable[[dict[str, Any]], None], order: dict[str, Any]) -> NoReturn:
    """Act, and end as an interpreter does, but for taking all modules apart, which would copy them first."""
    status: Any = 0
    try:
        act(order)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int | None) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
