"""Files damaged at random: each is refused in one sentence of a known class, or read as what it says."""

import os
import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from fuzz.judging import Wrong, judge
from fuzz.readers import NAMES, damage, readers

from ritz.storage import equal

# In all; `make fuzz` asks for more. The seed is fixed, so that what fails once fails again.
FILES = int(os.environ.get("RITZ_FUZZ", "1500"))
SEED = int(os.environ.get("RITZ_FUZZ_SEED", "0"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux's /proc")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_refused_in_a_sentence_or_read_whole(name, scratch):
    reader = readers(scratch)[name]
    good = reader.prepared(scratch)
    folder, canary = scratch / f"case of {name}", scratch / "canary"
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    for number in range(-(-FILES // len(NAMES))):
        rng = random.Random(f"{SEED} {name} {number}")
        what, forged = damage(reader, folder, canary, rng)

        def verify(found: object, forged: bool = forged) -> None:
            if reader.sealed and not forged and not equal(found, good):
                raise Wrong("something else was read than was saved")
            reader.verify(found, good)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                outcomes[judge(reader.read, folder, verify, canary)] += 1
        except Exception as error:
            canary.unlink(missing_ok=True)
            failed.append(f"file {number} ({what}): {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {sum(outcomes.values()) + len(failed)}:\n" + "\n".join(failed[:20])
    assert outcomes["refused"] > 0, "nothing was refused: the damage does not reach the reader"
