"""What an experiment has done so far, piece by piece: a kill loses the piece that was under way, and nothing else.

Training runs by a `Recipe` have folders of their own (`pool`). Pieces are everything else that takes minutes: the
measurements of one network, one seed of a study, many networks that are trained at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from ..checkpoint import Checkpoint
from ..fingerprints import code, mark
from ..storage import load, save
from .experiment import Setting
from .recipe import describe

T = TypeVar("T")
ALL = ("**/*.py",)  # files of the package


class Pieces:
    """The pieces of one experiment, in the folder RUNS/ITEM; without a folder for runs nothing is kept.

    Args:
        setting: Where runs are kept, and on which device they are; None keeps nothing.
        item: The name of the folder. Experiments that share pieces share the name.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> calls = []
        >>> def double(values): calls.append(1); return [2 * x for x in values.tolist()]
        >>> pieces = Pieces(Setting(runs=Path(tempfile.mkdtemp())), "toy")
        >>> [pieces.keep("doubled", double, torch.arange(3)) for _ in range(2)], len(calls)
        ([[0, 2, 4], [0, 2, 4]], 1)
    """

    def __init__(self, setting: Setting | None = None, item: str = "") -> None:
        self.folder = None if setting is None or setting.runs is None else setting.runs / item
        self._device = None if setting is None else setting.device

    def keep(self, name: str, work: Callable[..., T], *given: Any, **aside: Any) -> T:
        """`work(*given, **aside)`, or what it gave before.

        A piece is made anew if anything that it depends on has changed: the function or its settings, the data, the
        device, torch, or the code of ritz.

        Args:
            name: Of the piece, as files are named.
            work: A function at the top of a module, or a partial of one with plain arguments. It returns a tree that
                `ritz.storage.save` takes.
            given: Tensors, modules, and trees of them that it works on.
            aside: What changes no result, such as `progress`.

        Raises:
            TypeError: If `work` has no name by which it is known again.
            ValueError: If the file of the piece is damaged.
        """
        if self.folder is None:
            return work(*given, **aside)
        path = self.folder / name
        of = {"work": describe(work, "work"), "given": _marks(given), "device": self._device, "code": code(ALL)}
        if path.with_name(f"{name}.json").exists():
            kept: Any = load(path)
            if isinstance(kept, dict) and kept.get("of") == of:
                found: T = kept["found"]
                return found
        found = work(*given, **aside)
        save({"of": of, "found": found}, path)
        return found

    def training(self, seeds: Sequence[int]) -> Checkpoint | None:
        """A folder for networks of these seeds that are trained at once; seeds that are added later have their own."""
        return None if self.folder is None else Checkpoint(self.folder / f"training, seeds {seeds[0]} to {seeds[-1]}")


def _marks(tree: Any) -> Any:
    """The mark of every tensor of a tree; of a module what it consists of and the marks of its state."""
    if isinstance(tree, Tensor):
        return mark([tree])
    if isinstance(tree, nn.Module):
        return [str(tree), _marks(tree.state_dict())]
    if isinstance(tree, Mapping):
        return {key: _marks(part) for key, part in tree.items()}
    return [_marks(part) for part in tree]
