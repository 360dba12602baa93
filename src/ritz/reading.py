"""Files from elsewhere: a damaged or a hostile one ends in one sentence that says which, what is wrong, what to do.

Each check is made here, once, for every reader of the package. Only regular files are opened, since a pipe waits for
ever and a device has no end; and what a file says of its own sizes is held against its length before room is made for
it. What `torch.save` wrote is read by `pickled`.
"""

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

INFLATION = 100  # times its length that a compressed file may hold; images of digits have 5
ROOM = 1 << 24  # bytes that any file may hold, however short it is
SAVE_AGAIN = "save it again"


def damaged(path: Path | str, why: object, remedy: str = SAVE_AGAIN) -> NoReturn:
    """Raise the error of every reader: the file, what is wrong, what to do.

    Example:
        >>> damaged("trace.json", "no digits" + chr(10) + "at all")
        Traceback (most recent call last):
        ValueError: trace.json is damaged (no digits at all); save it again
    """
    cause = why if isinstance(why, BaseException) else None
    raise ValueError(f"{path} is damaged ({brief(why)}); {remedy}") from cause


def brief(why: object, length: int = 200) -> str:
    """An error, or what else is to be said, in one short line.

    Example:
        >>> brief(KeyError("a")), brief(RecursionError()), brief(ValueError("too" + chr(10) + "long"), 7)
        ("KeyError: 'a'", 'RecursionError', 'too ...')
    """
    text = " ".join(str(why)[: 4 * length].split())
    if isinstance(why, BaseException) and (not isinstance(why, ValueError | OSError) or not text):
        text = f"{type(why).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= length else f"{text[: length - 3]}..."


def content(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is a folder, a pipe or a device, or no name of a file.

    Example:
        >>> content("/dev/zero")
        Traceback (most recent call last):
        ValueError: /dev/zero is not a regular file; name a file
    """
    path = Path(path)
    refuse_irregular(path)
    return path.read_bytes()


def refuse_irregular(path: Path, links: bool = True) -> None:
    """See `content`; a link counts as what it leads to, or is refused itself."""
    try:
        kind = path.stat(follow_symlinks=links).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; name an existing file") from None
    except ValueError as error:  # a zero byte in the name
        raise ValueError(f"{str(path)!r} is not the name of a file ({error}); name an existing file") from error
    except OSError as error:  # links in a circle, a file taken for a folder
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a readable file") from error
    if not stat.S_ISREG(kind):
        raise ValueError(f"{path} is not a regular file; name a file")


# ---------------------------------------------------------------------------------------------------- JSON


def read_json(path: str | os.PathLike[str], remedy: str = SAVE_AGAIN) -> Any:
    """What a file of JSON says; see `parse_json`."""
    return parse_json(content(path), path, remedy)


def parse_json(raw: bytes, path: str | os.PathLike[str], remedy: str = SAVE_AGAIN) -> Any:
    """What JSON says, strictly: text in UTF-8, no key twice, no number that is not finite, not nested without end.

    Raises:
        ValueError: If it is anything else; it names `path` and the remedy.

    Example:
        >>> parse_json(b'{"a": 1, "a": 2}', "run.json", "run again")
        Traceback (most recent call last):
        ValueError: run.json is damaged (it has the key 'a' twice); run again
    """
    try:
        text = raw.decode("utf8")
        tree = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():  # half a character can be written so, and never printed
            json.dumps(tree, ensure_ascii=False).encode("utf8")
    except (ValueError, RecursionError) as error:
        damaged(Path(path), error, remedy)
    return tree


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"it has the key {brief(twice, 40)!r} twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{brief(digits, 40)} is too large a number")
    return value


def differences(there: Any, own: Any, where: str = "", length: int = 60) -> list[str]:
    """In words, where two trees of JSON differ; values are shown to so many characters.

    Example:
        >>> differences({"seed": 0, "data": {"count": 3}}, {"seed": 0, "data": {"count": 4}})
        ['data.count is 3 there and 4 here']
        >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}}, "x")
        ['x.c is 2 there and null here']
    """
    if isinstance(there, dict) and isinstance(own, dict):
        inner = ((f"{where}.{key}".strip("."), there.get(key), own.get(key)) for key in dict.fromkeys([*there, *own]))
        return [text for place, one, other in inner for text in differences(one, other, place, length)]
    if there == own:
        return []
    one, other = (text if len(text) <= length else f"{text[: length - 3]}..." for text in map(json.dumps, (there, own)))
    return [f"{where} is {one} there and {other} here"]


# ------------------------------------------------------------------------------------------------- tensors


def read_tensors(path: str | os.PathLike[str]) -> "tuple[dict[str, Tensor], Mapping[str, str]]":
    """Named tensors of a safetensors file, and the words that come with them.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is no safetensors file, or its head does not fit its length.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"x": torch.zeros(2)}, folder + "/x.safetensors", {"by": "me"})
        ...     read_tensors(folder + "/x.safetensors")
        ({'x': tensor([0., 0.])}, {'by': 'me'})
    """
    from safetensors import safe_open

    path = Path(path)
    refuse_irregular(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dictionary
            return tensors, file.metadata() or {}
    except Exception as error:  # the library has errors of its own, and torch some more
        damaged(path, error)


def inflate(raw: bytes) -> bytes:
    """What a gzipped file holds; one that would hold more than `INFLATION` times its length is refused.

    Raises:
        ValueError: If it is cut short or damaged, or holds too much.

    Example:
        >>> import gzip
        >>> inflate(gzip.compress(b"to be")), inflate(gzip.compress(b"to be") + gzip.compress(b"?"))
        (b'to be', b'to be?')
        >>> inflate(gzip.compress(bytes(1 << 25)))
        Traceback (most recent call last):
        ValueError: it says that it holds more than 16777216 bytes in 3...
    """
    parts, size, rest = [], 0, raw
    limit = max(ROOM, INFLATION * len(raw))
    while rest:
        stream = zlib.decompressobj(31)  # gzip's own head and checksum
        try:
            part = stream.decompress(rest, limit + 1 - size)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        size += len(part)
        check_size(size, len(raw))
        if not stream.eof:
            raise ValueError("it ends before its end is marked")
        parts.append(part)
        rest = stream.unused_data.lstrip(b"\0")  # archives may be padded
    return b"".join(parts)


def check_size(held: int, length: int) -> None:
    """Refuse what a file says that it holds, if that is far beyond its own length, in bytes.

    Example:
        >>> check_size(1 << 40, 1000)
        Traceback (most recent call last):
        ValueError: it says that it holds more than 16777216 bytes in 1000
    """
    limit = max(ROOM, INFLATION * length)
    if held > limit:
        raise ValueError(f"it says that it holds more than {limit} bytes in {length}")
