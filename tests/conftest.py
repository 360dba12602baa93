"""Fixtures and rules common to all tests. Nothing is seeded here: a test that draws numbers names its seed."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

# Tests compare with dense truth, so they run in float64, tensors made while a file is imported included.
torch.set_default_dtype(torch.float64)

# Test matrices are small: threads cost more than they give, and one thread adds up in one order.
# A test that measures time sets its own number; OMP_NUM_THREADS overrules this.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

# Time is not what is tested. Under CI the examples are the same each run, so that a red run can be repeated.
settings.register_profile("ritz", deadline=None, max_examples=30, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("ritz")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """A test that changes the default dtype does not change it for the next one."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def single() -> Iterator[None]:
    """As scripts run: in torch's default precision, on one thread."""
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """The scripts of benchmarks/ by name, each found as it finds its own parts; all are forgotten afterwards."""
    folder = Path(__file__).parent.parent / "benchmarks"
    sys.path.insert(0, str(folder))
    yield importlib.import_module
    sys.path.remove(str(folder))
    own = {path.stem for path in folder.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as a process in the foreground has it; a job in the background, as tests may be, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers come from a process that has torch loaded, which else is most of their time; all others are as ever.

    Tests that do not ask for this start workers as users do.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ritz.papers.pool"])
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets, in torchvision's layout; a test that asks for it is skipped where it is absent."""
    named = os.environ.get("RITZ_DATA")
    if not named:
        pytest.skip("RITZ_DATA is not set: it names the folder with MNIST and the other data sets")
    root = Path(named)
    if not root.is_dir():
        pytest.skip(f"RITZ_DATA names {named}, which is not a folder")
    return root


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no accelerator on this machine")
    for mark in item.iter_markers("oracle"):
        for module in mark.args or ("curvlinops",):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed: pip install --no-deps -r constraints/oracles.txt")
