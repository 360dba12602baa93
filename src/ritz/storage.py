"""Results on disk: JSON for numbers and text, safetensors for tensors; nothing is pickled, and what loads is equal."""

import dataclasses
import hashlib
import importlib
import json
import math
import numbers
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import replace, write_text
from .reading import brief, content, damaged, parse_json, read_tensors
from .schema import check_fields

FORMAT = 1  # version of the file format
_SHOWN = 3  # members of a collection in a line of text

# results that can be loaded, and where they live: a file names a class, never code
_HOMES = {
    "Estimate": "ritz.results",
    "Exact": "ritz.intervals",
    "StudentT": "ritz.intervals",
    "MatchedT": "ritz.intervals",
    "ChiSquare": "ritz.intervals",
    "CountedChiSquare": "ritz.intervals",
    "Hull": "ritz.intervals",
    "Affine": "ritz.intervals",
    "Reciprocal": "ritz.intervals",
    "Binomial": "ritz.intervals",
    "PairedShares": "ritz.intervals",
    "Bootstrap": "ritz.intervals",
    "RandomStart": "ritz.intervals",
    "Magnitude": "ritz.intervals",
    "Spectrum": "ritz.estimators.quantities",
    "Density": "ritz.estimators.density",
    "BlockSpectra": "ritz.estimators.blocks",
    "Outputs": "ritz.measures.outputs",
    "Settings": "ritz.measures.subject",
    "Measurement": "ritz.measures.measure",
    "Ranking": "ritz.measures.compare",
    "Comparison": "ritz.measures.compare",
    "Audit": "ritz.measures.audit",
    "Checkup": "ritz.doctor.checkup",
    "Finding": "ritz.doctor.checkup",
    "Trial": "ritz.doctor.checkup",
    "Projection": "ritz.doctor.checkup",
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
    "Tridiagonal": "ritz.krylov.tridiagonal",
    "LanczosState": "ritz.krylov.lanczos",
    "EigenPairs": "ritz.krylov.pairs",
}


def save(result: Any, path: str | os.PathLike[str]) -> Path:
    """Write a result as `path`.json (numbers, text) and `path`.safetensors (tensors). Nothing is pickled.

    A tree of dictionaries, lists, tuples, numbers, text, None and tensors, such as the state of an optimiser, is saved
    as well, keys that are integers among it. Dense tensors keep their strides, so that training goes on from them to
    the bit; those that share memory come back apart.

    Each file is written beside its name and moved into place, so a kill leaves the old one or the new one; the tensors
    carry the mark of their text, so that the new one of one and the old one of the other are not taken for a pair. The
    text has the checksum of all, so that a bit that has turned is found.

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
    head = {"format": FORMAT, "tensors": len(tensors), "checksum": _checksum(result, tensors)}
    text = json.dumps({**head, "result": result}, indent=1)
    if "\\ud" in text:
        json.dumps(result, ensure_ascii=False).encode("utf8")  # half a character: no file that holds one is read
    if tensors:
        mark = {"text": _mark(text.encode("utf8"))}
        replace(stem.with_name(stem.name + ".safetensors"), lambda part: save_file(tensors, part, mark))
    return write_text(stem.with_name(stem.name + ".json"), text)


class Result:
    """What every result has: it is equal to another of its kind with the same numbers, and can be saved."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in fields)})"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `path`.json and, where there are tensors, `path`.safetensors; `ritz.load` reads them back equal."""
        return save(self, path)


def _brief(value: Any) -> str:
    """A field of a result in a few words: tensors by their shapes, collections by what they begin with.

    Example:
        >>> _brief(torch.zeros(600, 3)), _brief(torch.tensor(2.0)), _brief(1 / 3), _brief({"conv1": 1, "fc": 2})
        ('tensor(600, 3)', '2', '0.333333', '{conv1, fc}')
        >>> _brief([f"layer {n}" for n in range(50)])
        "['layer 0', 'layer 1', 'layer 2', and 47 more]"
    """
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"tensor{tuple(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple):
        ends = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        names = [str(key) if isinstance(value, Mapping) else _brief(key) for key in list(value)[:_SHOWN]]
        more = [f"and {len(value) - _SHOWN} more"] if len(value) > _SHOWN else []
        return f"{ends[0]}{', '.join(names + more)}{ends[1]}"
    return repr(value)


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
        raise FileNotFoundError(f"there is no result at {source}; name an existing one")
    text = content(source)
    tree = parse_json(text, source)
    if not isinstance(tree, dict) or "format" not in tree:
        raise ValueError(f"{source} is not a result of ritz; name one that is")
    if tree["format"] != FORMAT:
        raise ValueError(
            f"{source} has format {brief(repr(tree['format']), 40)}; this version of ritz reads format {FORMAT}: save "
            "it again with this one"
        )
    if type(count := tree.get("tensors")) is not int:
        damaged(source, "it does not say how many tensors it has")
    tensors = _load_tensors(stem.with_name(stem.name + ".safetensors"), _mark(text)) if count else {}
    try:
        if len(tensors) != count:
            raise ValueError(f"it should come with {count} tensors, but there are {len(tensors)}")
        result = _whole(tree["result"], tensors)
        if "checksum" in tree and tree["checksum"] != _checksum(tree["result"], tensors):  # files before had none
            raise ValueError("its checksum does not match: a bit has flipped, or it was edited")
        return result
    except Exception as error:  # a tree that `save` did not write fails in nearly any way
        damaged(source, error)


def _load_tensors(source: Path, mark: str) -> dict[str, Tensor]:
    """The tensors that were saved with the text that has this mark."""
    if not source.exists():
        raise FileNotFoundError(f"{source} is missing; a result is two files, kept together: save it again")
    tensors, words = read_tensors(source)
    if words.get("text") != mark:
        raise ValueError(
            f"{source} belongs to another result than the .json beside it; a save was cut short: save again"
        )
    return tensors


def _mark(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _checksum(result: Any, tensors: Mapping[str, Tensor]) -> int:
    """Of the text of a result, however it is laid out, and of its tensors in the order of their names."""
    found = zlib.crc32(json.dumps(result).encode())
    for _, tensor in sorted(tensors.items()):
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


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
        # a copy in plain order: of one element any stride would be called contiguous, and its bytes could not be read
        tensors[where] = node.detach().cpu().permute(order).clone(memory_format=torch.contiguous_format)
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


def _whole(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What a tree says, each tensor used once; anything that `_encode` does not write is refused."""
    left = dict(tensors)
    result = _decode(tree, left)
    if left:
        raise ValueError(f"no part of it has the tensor {brief(next(iter(left)), 40)!r}")
    return result


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    match node:
        case None | str() | int() | float():
            return node
        case {"tensor": str(name)} if len(node) == 1:
            return _take(name, tensors)
        case {"permuted": str(name), "order": [*order]} if len(node) == 2:
            return _take(name, tensors).permute([order.index(dim) for dim in range(len(order))])
        case {"map": [*pairs]} if len(node) == 1:
            return _map(pairs, tensors)
        case {"tuple": [*items]} if len(node) == 1:
            return tuple(_decode(item, tensors) for item in items)
        case {"list": [*items]} if len(node) == 1:
            return [_decode(item, tensors) for item in items]
        case {"float": "inf" | "-inf" | "nan" as word} if len(node) == 1:
            return float(word)
        case {"type": str(name), "fields": dict(fields)} if len(node) == 2:
            return _result(name, fields, tensors)
    raise ValueError(f"{brief(str(node)[:80], 80)} is nothing that a result is made of")


def _take(name: str, tensors: dict[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise ValueError(f"there is no tensor {brief(name, 40)!r} beside it, or it is used twice")
    return tensors.pop(name)


def _map(pairs: list[Any], tensors: dict[str, Tensor]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not (key is None or isinstance(key, str | int)) or key in found:
            raise ValueError(f"it has the key {brief(str(key)[:40], 40)} twice, or as no key can be")
        found[key] = _decode(value, tensors)
    return found


def _result(name: str, fields: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """A result of the package, once its fields are what its class says."""
    home = _HOMES.get(name)
    if home is None:
        raise ValueError(f"it names an unknown result {brief(name, 40)!r}")
    cls = getattr(importlib.import_module(home), name)
    found = {field: _decode(value, tensors) for field, value in fields.items()}
    check_fields(cls, found)
    return cls(**found)
