"""All runs of several ranks, in one launch."""

import shutil
from collections.abc import Iterator

import pytest
from distributed.ranks import Launch, Task

SIZES = (1, 3)  # an odd number, which divides next to nothing
OTHERS = (2, 4)
LOST = ("killed", "asleep", "frozen")


def agreeing(size: int) -> Task:
    return Task(f"{size} ranks", size, "distributed.checks.run_all")


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """What the ranks found; those of the second wave come to grief."""
    agree = [agreeing(size) for size in SIZES]
    grief = [Task(how, 3, "distributed.faults.lost", (how,), awaited=(0, 2)) for how in LOST]
    grief += [Task("knotted", 3, "distributed.faults.knotted", awaited=(0, 1, 2))]
    grief += [Task("refusals", 3, "distributed.faults.refusals", awaited=(0, 1, 2))]
    grief += [Task("memory", 3, "distributed.faults.out_of_memory")]
    made = Launch([agree, grief], env={"RITZ_PATIENCE": "4"})
    yield made.wait()
    shutil.rmtree(made.folder)


@pytest.fixture(scope="session")
def runs(launch: Launch) -> dict[int, list[dict[str, object]]]:
    """What each rank of each run found, by world size."""
    return {size: launch.results(f"{size} ranks") for size in SIZES}


@pytest.fixture(scope="session")
def other_runs() -> Iterator[dict[int, list[dict[str, object]]]]:
    """The same of more numbers of ranks, for slow tests."""
    made = Launch([[agreeing(size)] for size in OTHERS], env={"RITZ_PATIENCE": "4"}).wait()
    yield {size: made.results(f"{size} ranks") for size in OTHERS}
    shutil.rmtree(made.folder)
