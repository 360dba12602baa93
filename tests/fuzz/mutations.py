"""Damage of every kind to files: turned bits, lost and doubled pieces, wrong trees of JSON, hostile heads and links."""

import copy
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from ritz import storage

MAGIC = [
    b"\0" * 8,
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\xff\xff\xff\x7f",
    struct.pack("<Q", 1 << 40),
    b"}",
    b'"',
    b"[",
]
WORDS = [
    None, True, -1, 0, 3, 1 << 63, 10**400, 1e308, 5e-324, float("nan"), float("inf"), "", "NaN", "../../../etc/passwd",
    "\ud800", "a" * 5000, "\0", "/dev/zero", "os.system", [], {}, [[]], {"": None}, {"tensor": "/x"},
    {"map": [[[], 1]]}, {"tuple": 3}, {"float": "inf"}, {"type": "Estimate", "fields": {}},
    {"type": "os.system", "fields": {}}, {"permuted": "/x", "order": [5, 5]},
    {"type": "RandomStart", "fields": {"dim": 1}},
]  # fmt: skip
DEEP = 100_000  # brackets within brackets


# --------------------------------------------------------------------------------------------------- bytes


def _cut(raw: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(raw) + 1)
    return start, min(len(raw), start + rng.choice([1, 2, 8, 64, 1000]))


def flip(raw: bytes, rng: random.Random) -> bytes:
    """Some bits turned."""
    found = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8]) if raw else 0):
        found[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(found)


def flip_early(raw: bytes, rng: random.Random) -> bytes:
    """The same near the start, where heads are."""
    head = raw[:200]
    return flip(head, rng) + raw[200:]


def truncate(raw: bytes, rng: random.Random) -> bytes:
    """The end lost."""
    return raw[: rng.randrange(len(raw) + 1)]


def delete(raw: bytes, rng: random.Random) -> bytes:
    """A piece lost."""
    start, end = _cut(raw, rng)
    return raw[:start] + raw[end:]


def double(raw: bytes, rng: random.Random) -> bytes:
    """A piece twice."""
    start, end = _cut(raw, rng)
    return raw[:end] + raw[start:]


def overwrite(raw: bytes, rng: random.Random) -> bytes:
    """A piece replaced by one that readers stumble over."""
    start, word = rng.randrange(len(raw) + 1), rng.choice(MAGIC)
    return raw[:start] + word + raw[start + len(word) :]


def insert(raw: bytes, rng: random.Random) -> bytes:
    """Bytes put in between."""
    start, _ = _cut(raw, rng)
    return raw[:start] + rng.choice([*MAGIC, rng.randbytes(rng.randrange(50))]) + raw[start:]


def nothing(raw: bytes, rng: random.Random) -> bytes:
    """All lost, or all zero."""
    return bytes(rng.choice([0, len(raw)]))


def noise(raw: bytes, rng: random.Random) -> bytes:
    """Something else altogether."""
    return rng.randbytes(rng.choice([1, 10, 1000]))


BYTES = [flip, flip, flip_early, truncate, delete, double, overwrite, insert, nothing, noise]


# ---------------------------------------------------------------------------------------------------- JSON


def _places(tree: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree but its top."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((*where, key), *_places(value, (*where, key)))]


def wrong_tree(raw: bytes, rng: random.Random) -> bytes:
    """One to three places of a tree replaced, lost, renamed or doubled; sometimes brackets without end."""
    tree = json.loads(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(tree)
        if not places:
            return json.dumps(rng.choice(WORDS)).encode()
        *way, last = rng.choice(places)
        at = tree
        for step in way:
            at = at[step]
        how = rng.randrange(8)
        if how == 0:
            del at[last]
        elif how == 1 and isinstance(at, dict):
            at[rng.choice(["", "type", "fields", "tensor", "format", str(last) + "'"])] = at.pop(last)
        elif how == 2:  # what another place has
            here = tree
            for step in rng.choice(places):
                here = here[step] if isinstance(here, dict | list) and step in _keys(here) else here
            at[last] = json.loads(json.dumps(here)) if len(json.dumps(here)) < 100_000 else None
        elif how == 3 and isinstance(at[last], int | float) and not isinstance(at[last], bool):
            at[last] = rng.choice([-at[last], at[last] * 1000, at[last] + 1, str(at[last])])
        else:
            at[last] = copy.deepcopy(rng.choice(WORDS))
    text = json.dumps(tree, indent=rng.choice([None, 1]))
    return (
        _deepened(text, rng) if rng.randrange(20) == 0 else _twice(text) if rng.randrange(15) == 0 else text
    ).encode()


def _keys(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node))


def _deepened(text: str, rng: random.Random) -> str:
    depth = rng.choice([500, 2000, DEEP])
    return text.replace("null", "[" * depth + "]" * depth, 1) if "null" in text else "[" * depth


def _twice(text: str) -> str:
    """The first key of the top with another value after the first."""
    return text.replace("{", '{"format": 2, "format": 1, ', 1)


def wrong_line(raw: bytes, rng: random.Random) -> bytes:
    """A line of many changed as a tree, or by bytes."""
    lines = raw.split(b"\n")
    place = rng.randrange(max(len(lines) - 1, 1))
    lines[place] = wrong_tree(lines[place] or b"{}", rng) if rng.randrange(2) else rng.choice(BYTES)(lines[place], rng)
    return b"\n".join(lines)


# ------------------------------------------------------------------------------------------------- tensors


def wrong_head(raw: bytes, rng: random.Random) -> bytes:
    """The head of a safetensors file changed: sizes, types, names, or the length that it says it has."""
    length = struct.unpack("<Q", raw[:8])[0]
    head = wrong_tree(raw[8 : 8 + length], rng)
    if rng.randrange(3) == 0:
        tree = json.loads(raw[8 : 8 + length])
        name = rng.choice([key for key in tree if key != "__metadata__"] or ["x"])
        tree[name] = rng.choice(
            [
                {"dtype": "F64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]},
                {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
                {"dtype": "U8", "shape": [1 << 34], "data_offsets": [0, 8]},
                {"dtype": "F99", "shape": [], "data_offsets": [0, 8]},
            ]
        )
        head = json.dumps(tree).encode()
    said = rng.choice([len(head)] * 8 + [1 << 62, 0, len(head) + 1])
    return struct.pack("<Q", said) + head + raw[8 + length :]


class Canary:
    """Runs a command when it is unpickled by a reader that trusts it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


@cache
def hostile_pickles(canary: Path) -> list[bytes]:
    """Pickles that would make the file `canary`, or ask for more memory than there is."""
    touch = f"touch {canary}"
    found = [pickle.dumps(Canary(os.system, touch), protocol) for protocol in (0, 2, 4)]
    code = f"open({str(canary)!r}, 'w')"
    found += [pickle.dumps({"data": Canary(eval, code), "labels": [1]}, 2), pickle.dumps(Canary(exec, code), 2)]
    found += [pickle.dumps(Canary(os.open, str(canary), os.O_CREAT), 2)]
    found += [
        b"cbuiltins\ngetattr\n(cposix\nsystem\nS'__call__'\ntR(S'" + touch.encode() + b"'\ntR.",
        b"\x80\x02r\xff\xff\xff\x7f}.",  # a place in the memo that is two thousand million on
        b"\x80\x02N" + b"r" + struct.pack("<I", (1 << 32) - 2) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 45) + b"x.",  # bytes that are not there
        b"\x80\x03B" + struct.pack("<I", (1 << 31) - 1) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # a buffer
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 45) + b"N.",  # a frame
        b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",  # a whole number
        pickle.dumps(Canary(bytearray, 1 << 42), 2),
        pickle.dumps({"data": Canary(bytes, 1 << 42), "labels": []}, 2),
        b"(" * 50_000 + b"." + b"l" * 50_000,
        b"\x80\x02" + b"]" + b"q\0" + b"h\0a" * 20 + b".",
        b"\x80\x02(K\x02K\x03t"
        + b"cnumpy\nndarray\n)R"
        + b"(K\x01(J\xff\xff\xff\x7fC\x02aatcnumpy\ndtype\nU\x02u1\x85R"
        b"\x89C\x02aatb.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I1000000000\nS'aaaaaaaa'\nt"
        b"cnumpy\ndtype\n(S'u1'\ntRI00\nS'aa'\ntb.",
    ]
    return found


@cache
def hostile_archives(canary: Path) -> list[bytes]:
    """Files of torch's kind with such a pickle inside, or that swell."""
    found = []
    for inside in hostile_pickles(canary):
        found.append(_zipped({"archive/data.pkl": inside, "archive/version": b"3\n", "archive/byteorder": b"little"}))
    found.append(_zipped({"archive/data.pkl": bytes(1 << 26), "archive/version": b"3\n"}, zipfile.ZIP_DEFLATED))
    found.append(_zipped({"../../data.pkl": b"N.", "archive/version": b"3\n"}))
    return found


def _zipped(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, inside in members.items():
            archive.writestr(name, inside)
    return file.getvalue()


# ------------------------------------------------------------------------------------------- files in a folder


def resealed(folder: Path, stem: str) -> None:
    """Make two files of a result a pair again, without a checksum: what whoever forges one would do."""
    text, tensors = folder / f"{stem}.json", folder / f"{stem}.safetensors"
    raw = text.read_bytes()
    try:
        tree = json.loads(raw)
        tree.pop("checksum", None)
        raw = json.dumps(tree).encode()
        text.write_bytes(raw)
        if tensors.is_file():
            tensors.write_bytes(bytes_of(tensors_of(tensors.read_bytes()), {"text": storage._mark(raw)}))
    except Exception:  # so damaged that no seal helps
        pass


def odd_file(path: Path, rng: random.Random) -> str:
    """In the place of a file: nothing, a folder, a pipe, a link that leads nowhere, in a circle or to no end."""
    path.unlink()
    how = rng.choice(["nothing", "folder", "pipe", "nowhere", "circle", "no end", "secret"])
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "nothing":
        ends = {"nowhere": "not there", "circle": path.name, "no end": "/dev/zero", "secret": "/etc/hostname"}
        path.symlink_to(ends[how])
    return f"{how} in its place"
