"""From what is typed to risks: the user's function, run as their own code, and files of weights, which are only read.

Every refusal is a ValueError or OSError of one line that says what to do.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import interrupts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..risk import Risk

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_INSIDE = ("state_dict", "model_state_dict", "model")  # where checkpoints of others keep the weights
_NAMED = 6  # names of a list that are shown


@dataclass(frozen=True)
class Place:
    """A function in a file, as it is typed: study.py:make_risk.

    Example:
        >>> Place.parse("study.py:make_risk")
        Place(file=PosixPath('study.py'), function='make_risk')
        >>> Place.parse("study.py")
        Traceback (most recent call last):
        ValueError: 'study.py' names no function; write FILE.py:FUNCTION, as in study.py:make_risk
    """

    file: Path
    function: str

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Refuse what is not of this form."""
        file, _, function = text.rpartition(":")
        if not file or not function.isidentifier():
            raise ValueError(f"{text!r} names no function; write FILE.py:FUNCTION, as in study.py:make_risk")
        return cls(Path(file), function)

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass
class Code:
    """The user's files, each loaded once; their folders are where their own imports are looked for."""

    seed: int = 0
    loaded: dict[Path, ModuleType] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self) -> Iterator["Code"]:
        """Until the command is done, as a function may import when it is called; then their modules are let go."""
        path, before = list(sys.path), set(sys.modules)
        try:
            yield self
        finally:
            sys.path[:] = path
            folders = {str(file.parent) for file in self.loaded}
            for name in sys.modules.keys() - before:
                if str(Path(getattr(sys.modules[name], "__file__", None) or "").parent) in folders:
                    del sys.modules[name]

    def risk(self, text: str) -> "Risk":
        """What a function of theirs returns.

        Raises:
            ValueError: If there is no such function, if their code raises, or if it returns no risk.
            FileNotFoundError: If there is no such file.
        """
        import torch

        from ..risk import Risk

        place = Place.parse(text)
        module = self._module(place.file)
        function = getattr(module, place.function, None)
        if not callable(function):
            raise ValueError(f"{place.file} has no function {place.function!r}; {_near(place.function, module)}")
        torch.manual_seed(self.seed)
        with _as_theirs(place.file, f"{place} failed"):
            made = function()
        if not isinstance(made, Risk):
            raise ValueError(
                f"{place} returned a {type(made).__name__}, not a ritz.Risk; let it end with "
                "`return ritz.Risk(model, loss, data)`"
            )
        return made

    def _module(self, file: Path) -> ModuleType:
        path = file.absolute()
        if path in self.loaded:
            return self.loaded[path]
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {file}; give FILE.py:FUNCTION with a path from {Path.cwd()}")
        name = path.stem if path.stem not in sys.modules else f"{path.stem} of the user"  # random.py, say
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{file} is not Python; give FILE.py:FUNCTION")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))  # as Python does for a script
        self.loaded[path] = sys.modules[name] = module
        with _as_theirs(file, f"{file} cannot be loaded"):
            spec.loader.exec_module(module)
        return module


def _near(name: str, module: ModuleType) -> str:
    """The functions of a module that may have been meant, or all."""
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    near = difflib.get_close_matches(name, own, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {_list(own)}"


@contextlib.contextmanager
def _as_theirs(file: Path, what: str) -> Iterator[None]:
    """An error of the user's code as one line, with the place in their file; the current folder stays what it was."""
    try:
        with contextlib.chdir(Path.cwd()):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: a script may end itself
        interrupts.check()
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.absolute()]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        at = "" if line is None else f" in line {line}"
        text = " ".join(str(error).split())
        raise ValueError(f"{what}{at}: {type(error).__name__}: {text}; fix it and try again") from error


# ------------------------------------------------------------------------------------------------- weights


def read_weights(path: Path) -> "dict[str, Tensor]":
    """Named tensors of a .safetensors file, or of a .pt file read with `weights_only=True`: no code in it is run.

    Raises:
        ValueError: If the file is damaged, holds more than tensors, or is of neither kind.
        FileNotFoundError: If it is not there.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights at {path}; give a .safetensors or .pt file")
    if path.suffix == ".safetensors":
        from ..reading import read_tensors

        return read_tensors(path)[0]
    if path.suffix in _PICKLED:
        from ..pickled import read_pickled

        return _named(read_pickled(path), path)
    raise ValueError(f"{path} is neither .safetensors nor {', '.join(_PICKLED)}; save the weights as one of these")


def _named(tree: Any, path: Path) -> "dict[str, Tensor]":
    """The named tensors of a checkpoint: it is a dictionary of them, or has one inside."""
    import torch

    inside = next(
        (tree[key] for key in _INSIDE if isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping)), tree
    )
    if not isinstance(inside, Mapping) or not any(isinstance(value, torch.Tensor) for value in inside.values()):
        raise ValueError(f"{path} holds no named tensors; save model.state_dict()")
    return {str(name): value for name, value in inside.items() if isinstance(value, torch.Tensor)}


def fit_weights(model: "nn.Module", found: "Mapping[str, Tensor]", path: Path) -> "dict[str, Tensor]":
    """The weights under the names that a risk has them by; what does not fit is listed.

    Raises:
        ValueError: If names are missing or not known, shapes differ, or tied weights are not equal.
    """
    import torch

    from ..weights import first_names, inner_names

    every = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first = first_names(model)
    named = inner_names(found, every, whatever=True)
    unknown = [name for name in named if name not in every and not name.endswith("_extra_state")]
    shapes = [
        f"{name} is {tuple(t.shape)} there and {tuple(every[name].shape)} in the model"
        for name, t in named.items()
        if name in every and t.shape != every[name].shape
    ]
    kinds = [
        f"{name} is {t.dtype}" for name, t in named.items()
        if name in every and every[name].is_floating_point() and not t.is_floating_point()
    ]  # fmt: skip
    fitted: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if name in every:
            own = first[name]
            if own in fitted and not torch.equal(fitted[own], tensor):
                raise ValueError(f"{path}: {name} and {own} are one tensor in the model and two in the file; tie them")
            fitted[own] = tensor
    wanted = {first[name] for name in model.state_dict() if name in every}
    missing = [name for name in every if name in wanted and name not in fitted]
    wrong = [
        ("missing", missing),
        ("not in the model", unknown),
        ("of another shape", shapes),
        ("no real numbers", kinds),
    ]
    if any(names for _, names in wrong):
        said = "; ".join(f"{what}: {_list(names)}" for what, names in wrong if names)
        raise ValueError(f"{path} does not fit the model: {said}; give weights of this model, or the model of these")
    return fitted


def start(risk: "Risk", path: Path | None) -> "dict[str, Tensor] | None":
    """The weights of a file under the names of a risk; None where there is no file."""
    return None if path is None else fit_weights(risk.model, read_weights(path), path)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names for files: their stems, or as much of their paths as tells them apart.

    Example:
        >>> names_of([Path("a.pt"), Path("b.pt")]), names_of([Path("run1/last.pt"), Path("run2/last.pt")])
        (['a', 'b'], ['run1/last', 'run2/last'])
        >>> names_of([Path("a.pt"), Path("a.pt")])
        Traceback (most recent call last):
        ValueError: a.pt is given twice; give each file once
    """
    whole = [path.absolute() for path in paths]
    for path in paths:
        if whole.count(path.absolute()) > 1:
            raise ValueError(f"{path} is given twice; give each file once")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join([*path.parts[-depth:-1], path.stem]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [path.name for path in paths]  # a.pt and a.safetensors


# --------------------------------------------------------------------------------------------- device, data


def placed(risk: "Risk", device: str | None, dtype: str | None) -> "Risk":
    """The same risk computed elsewhere or in another precision.

    Raises:
        ValueError: If there is no such device here.
    """
    import torch

    if device is None and dtype is None:
        return risk
    return risk.to(device, None if dtype is None else getattr(torch, dtype))


def identity_of(risk: "Risk") -> dict[str, Any]:
    """Marks of weights and data, by which a run is known to be the same."""
    return {
        "weights": weights_mark(risk), "data": f"{risk.num_samples} samples, {data_mark(risk):.9g}",
        "kind": risk.convention(), "device": risk.device.type,
    }  # fmt: skip


def data_mark(risk: "Risk") -> float:
    """A mark of all samples, whatever their order."""
    from ..batches import mark_in_any_order

    return mark_in_any_order(risk.batches)


def weights_mark(risk: "Risk") -> str:
    """A mark of every parameter and buffer."""
    import torch

    state = hashlib.sha256()
    for name, tensor in risk.state().items():
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may have any stride
        state.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def subject_of(risk: "Risk") -> dict[str, Any]:
    """What is studied, in words and sizes."""
    loss = "batch_loss" if risk.opaque else type(risk.output_loss).__name__
    return {
        "model": type(risk.model).__name__, "num_params": risk.dim, "num_samples": risk.num_samples, "loss": loss,
        "convention": risk.convention(),
    }  # fmt: skip


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more if names else "none"
