"""Results on disk: JSON for numbers and text, safetensors for tensors; nothing is pickled, and what loads is equal."""

import dataclasses
import hashlib
import importlib
import json
import math
import numbers
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = 1  # version of the file format

# results that can be loaded, and where they live: a file names a class, never code
_HOMES = {
    "Estimate": "ritz.results",
    "Exact": "ritz.intervals",
    "StudentT": "ritz.intervals",
    "ChiSquare": "ritz.intervals",
    "Hull": "ritz.intervals",
    "Affine": "ritz.intervals",
    "Reciprocal": "ritz.intervals",
    "Binomial": "ritz.intervals",
    "Bootstrap": "ritz.intervals",
    "RandomStart": "ritz.intervals",
    "Magnitude": "ritz.intervals",
    "Spectrum": "ritz.estimators.quantities",
    "Outputs": "ritz.measures.outputs",
    "Settings": "ritz.measures.subject",
    "Measurement": "ritz.measures.measure",
    "Ranking": "ritz.measures.compare",
    "Comparison": "ritz.measures.compare",
    "Audit": "ritz.measures.audit",
    "Claim": "ritz.papers.base",
    "Semicircle": "ritz.rmt.laws",
    "MarchenkoPastur": "ritz.rmt.laws",
    "LawFit": "ritz.rmt.fitting",
    "Outliers": "ritz.rmt.outlying",
    "Spiked": "ritz.rmt.spikes",
    "Shrinkage": "ritz.rmt.shrinking",
    "Line": "ritz.landscape.pictures",
    "Interpolation": "ritz.landscape.pictures",
    "Plane": "ritz.landscape.pictures",
    "LayerSpectra": "ritz.measures.norms.layer_spectra",
    "LayerSpectrum": "ritz.measures.norms.layer_spectra",
    "PowerLaw": "ritz.measures.norms.matrix_laws",
    "Bulk": "ritz.measures.norms.matrix_laws",
    "MarginDistribution": "ritz.measures.margins.distribution",
    "LayerMargins": "ritz.measures.margins.layers",
    "MarginStudy": "ritz.measures.margins.trace_study",
    "Correlation": "ritz.measures.study.correlation",
    "PointCorrelations": "ritz.measures.study.correlation",
    "MarginCorrelations": "ritz.measures.study.correlation",
    "Granulated": "ritz.measures.study.axes",
    "SignError": "ritz.measures.study.axes",
    "Information": "ritz.measures.study.axes",
    "StudyRow": "ritz.measures.study.ranking",
    "Study": "ritz.measures.study.ranking",
    "Head": "ritz.krylov.head",
    "Tridiagonal": "ritz.krylov.lanczos",
    "LanczosState": "ritz.krylov.lanczos",
    "EigenPairs": "ritz.krylov.eigen",
}


def save(result: Any, path: str | os.PathLike[str]) -> Path:
    """Write a result as `path`.json (numbers, text) and `path`.safetensors (tensors). Nothing is pickled.

    A tree of dictionaries, lists, tuples, numbers, text, None and tensors, such as the state of an optimiser, is saved
    as well, keys that are integers among it. Dense tensors keep their strides, so that training goes on from them to
    the bit; those that share memory come back apart.

    Each file is written beside its name and moved into place, so a kill leaves the old one or the new one; the tensors
    carry the mark of their text, so that the new one of one and the old one of the other are not taken for a pair.

    Example:
        >>> import tempfile
        >>> state = {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 0.999), "foreach": None}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load(save(state, folder + "/optimizer"))
        {'state': {0: {'step': tensor(3.)}}, 'groups': [{'betas': (0.9, 0.999), 'foreach': None}]}
    """
    from safetensors.torch import save_file

    stem = _stem(path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    result = _encode(result, "", tensors)
    text = json.dumps({"format": FORMAT, "tensors": len(tensors), "result": result}, indent=1)
    if tensors:
        mark = {"text": _mark(text)}
        _replace(stem.with_name(stem.name + ".safetensors"), lambda part: save_file(tensors, part, mark))
    return write_text(stem.with_name(stem.name + ".json"), text)


def write_text(target: Path, text: str) -> Path:
    """A file of text, whole or as it was before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "run.json", "{}").read_text()
        '{}'
    """
    _replace(target, lambda part: part.write_text(text, encoding="utf8"))
    return target


def load(path: str | os.PathLike[str]) -> Any:
    """Read back what a result's `.save(path)` wrote, equal to what was saved.

    Example:
        >>> import tempfile, ritz
        >>> e = ritz.Estimate(name="trace", value=3.0, stderr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ritz.load(e.save(folder + "/trace")) == e
        True
    """
    stem = _stem(path)
    source = stem.with_name(stem.name + ".json")
    if not source.exists():
        raise FileNotFoundError(f"no result at {source}")
    text = source.read_text(encoding="utf8")
    tree = json.loads(text)
    if tree.get("format") != FORMAT:
        raise ValueError(f"{source} has format {tree.get('format')!r}; this version of ritz reads format {FORMAT}")
    tensors = _load_tensors(stem.with_name(stem.name + ".safetensors"), _mark(text)) if tree["tensors"] else {}
    return _decode(tree["result"], tensors)


def _load_tensors(source: Path, mark: str) -> dict[str, Tensor]:
    """The tensors that were saved with the text that has this mark."""
    from safetensors import safe_open

    if not source.exists():
        raise FileNotFoundError(f"{source} is missing; a result is two files, and both must be kept together")
    with safe_open(source, framework="pt") as file:
        if (file.metadata() or {}).get("text") != mark:
            raise ValueError(f"{source} belongs to another result than the .json beside it; a save was cut short")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary


def _mark(text: str) -> str:
    return hashlib.blake2b(text.encode("utf8"), digest_size=16).hexdigest()


def equal(a: Any, b: Any) -> bool:
    """Same type, same fields; tensors element by element, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        a, b = a.cpu(), b.cpu()
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _stem(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in {".json", ".safetensors"} else path


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the target and move there what is on the disk: neither a kill nor a power cut leaves a torn file."""
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")  # its own: two processes may save at once
    try:
        part.touch()
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)  # that of any new file: safetensors makes its own for the owner alone
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:  # a full disk: what there is of the part would keep it full
        part.unlink(missing_ok=True)
        raise


def _order(tensor: Tensor) -> list[int]:
    """The dimensions as they lie in memory, where that is another order than theirs and nothing else (a transpose)."""
    own = list(range(tensor.ndim))
    if tensor.is_contiguous():
        return own
    order = sorted(own, key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else own


def _encode(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of dataclasses, mappings and tensors as JSON; tensors go into `tensors` under their place in the tree."""
    if isinstance(node, Tensor):
        while where in tensors:  # {"a/b": x} and {"a": {"b": y}} are at one place
            where += "'"
        order = _order(node)  # strides too: products of matrices that are equal but for them differ in the last bit
        tensors[where] = node.detach().cpu().permute(order).contiguous().clone()
        return {"tensor": where} if order == sorted(order) else {"permuted": where, "order": order}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        if type(node).__name__ not in _HOMES:
            raise TypeError(f"{type(node).__name__} cannot be saved")
        fields = {
            f.name: _encode(getattr(node, f.name), f"{where}/{f.name}", tensors) for f in dataclasses.fields(node)
        }
        return {"type": type(node).__name__, "fields": fields}
    if isinstance(node, Mapping):
        for key in node:
            if not (key is None or isinstance(key, str | int)):
                raise TypeError(f"cannot save a key that is a {type(key).__name__}, {key!r} (at {where or 'the top'})")
        return {"map": [[key, _encode(value, f"{where}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, tuple | list):
        items = [_encode(item, f"{where}/{i}", tensors) for i, item in enumerate(node)]
        return {"list" if isinstance(node, list) else "tuple": items}
    if isinstance(node, float) and not math.isfinite(node):
        return {"float": repr(float(node))}  # JSON has no infinities; NumPy's float64 calls itself by its type
    if node is None or isinstance(node, str | int | float | bool):
        return node
    if isinstance(node, numbers.Integral):  # a seed of NumPy's
        return int(node)
    raise TypeError(f"cannot save a {type(node).__name__} (at {where or 'the top'})")


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "permuted" in node:
        order = node["order"]
        return tensors[node["permuted"]].permute([order.index(dim) for dim in range(len(order))])
    if "map" in node:
        return {key: _decode(value, tensors) for key, value in node["map"]}
    if "tuple" in node:
        return tuple(_decode(item, tensors) for item in node["tuple"])
    if "list" in node:
        return [_decode(item, tensors) for item in node["list"]]
    if "float" in node:
        return float(node["float"])
    home = _HOMES.get(node["type"])
    if home is None:
        raise ValueError(f"the file names an unknown result {node['type']!r}")
    cls = getattr(importlib.import_module(home), node["type"])
    return cls(**{name: _decode(value, tensors) for name, value in node["fields"].items()})
