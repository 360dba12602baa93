"""One forking process for all tests of faults, and what each job finds when it is left alone."""

from collections.abc import Iterator

import pytest
from faults.trials import Server, Whole, left_alone, names


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.fixture(scope="session")
def wholes(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    folder = tmp_path_factory.mktemp("whole")
    return {job: left_alone(server, job, folder / "run") for job in names()}
