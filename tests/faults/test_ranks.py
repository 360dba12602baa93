"""Ranks that keep their states together: after any kill they go on from the newest that all of them have."""

from pathlib import Path

import pytest
from distributed.ranks import Launch, Task

MODES = ("locked", "full")
pytestmark = pytest.mark.timeout(300)  # of all runs together


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    folders = {mode: str(root / mode) for mode in MODES}
    first = [Task(f"torn {mode}", 2, "faults.ranked.torn", (folders[mode], mode), awaited=(0,)) for mode in MODES]
    second = [Task(f"resumed {mode}", 2, "faults.ranked.resumed", (folders[mode], mode)) for mode in MODES]
    second += [Task("stopped", 2, "faults.ranked.stopped", (str(Path(root) / "stopped"),))]
    made = Launch([first, second], env={"RITZ_PATIENCE": "4", "PYTHONSAFEPATH": "1"})
    yield made.wait()
    made.stop()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_which_one_has_not_the_newest_state_go_on_from_the_one_before(mode, launch):
    assert launch.results(f"torn {mode}") == ["RankError"]
    (at, ahead, *bits), (also_at, behind, *also) = launch.results(f"resumed {mode}")
    assert len(ahead) == 2  # the new one, and the one before, which is removed when all have the new one
    assert behind == ahead[:1]
    assert at == also_at
    assert len({*bits, *also}) == 1


def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(launch):
    (stop, *bits), (other, *also) = launch.results("stopped")
    assert stop == other
    assert stop.startswith("stopped by SIGTERM after")
    assert len({*bits, *also}) == 1
