"""What a risk keeps of its products so that the next ones are faster; each gives the same without."""

import logging

from .compilation import Compilations
from .held import Held
from .replay import Recordings

log = logging.getLogger(__name__)


class Shortcuts:
    """Products that were recorded or compiled, and what those of one batch share; of one model and loss.

    Example:
        >>> shortcuts, x = Shortcuts(), torch.ones(1)
        >>> for _ in range(2):
        ...     _ = shortcuts.recordings.run("same", lambda x: (x,), [x])
        >>> shortcuts.hold_memory, shortcuts.let_go(), shortcuts.hold_memory
        (True, True, False)
    """

    def __init__(self) -> None:
        self.recordings, self.compilations, self.held = Recordings(), Compilations(), Held()

    @property
    def hold_memory(self) -> bool:
        """Whether memory of the device is held: by recordings, or by what products of a batch share."""
        return len(self.recordings) + len(self.held) > 0

    def let_go(self) -> bool:
        """Give that memory back, and hold no more of it for the same; whether there was any."""
        found = [self.recordings.let_go(), self.held.let_go()]
        if any(found):
            log.warning("out of memory: what was recorded, or kept for the next product, is released")
        return any(found)

    def __getstate__(self) -> dict[str, object]:  # they belong to this process
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
