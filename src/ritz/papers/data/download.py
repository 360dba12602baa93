"""Getting the official files: a part that is there is gone on with, and only what has the right checksum is kept."""

import shutil
import tarfile
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .catalogue import Archive, DataSet, File, find
from .files import data_root, md5_of, verified

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

TIMEOUT = 60.0  # seconds without a byte
CHUNK = 1 << 18


def download(
    name: str | DataSet,
    root: Path | str | None = None,
    *,
    progress: Progress | None = None,
    urls: Sequence[str] | None = None,
) -> Path:
    """Get a data set's official files into torchvision's layout, and return the folder of all data sets.

    What is there and right is left alone, and without a network nothing more is needed then. A file is received beside
    its place, as NAME.part, and moved there in one step once its checksum is right; if the line breaks, the next
    server, or the next call, goes on where it broke. A file in its place that is not the official one is kept as
    NAME.bad.

    Args:
        name: A data set, or a row of one's own.
        root: The folder; None takes RITZ_DATA.
        progress: Called with the bytes that are there and the bytes in all.
        urls: Folders on servers to use instead of the official ones.

    Raises:
        FileNotFoundError: If neither root nor RITZ_DATA is given.
        OSError: If no server gave the right file; it says what each did.
        ValueError: If there is no such data set, or an archive lacks a file.

    Example:
        >>> download("digits", "data").name  # it comes with scikit-learn
        'data'
    """
    data = find(name)
    folder = data_root(data.name, root)
    total, done = sum(archive.size for archive in data.archives), 0
    for archive in data.archives:
        files = [file for file in data.files if file.archive == archive]
        if not all(_is_right(data, file, folder) for file in files):
            path = _fetch(archive, folder, data.urls if urls is None else urls, _shifted(progress, done, total))
            if archive.is_tar:
                _unpack(path, data, files, folder)
            elif (unpacked := folder / files[0].path) != path:
                _set_aside(unpacked)  # it would be read in place of the archive, and it is not right
        done += archive.size
        if progress is not None:
            progress(done, total)
    return folder


def _is_right(data: DataSet, file: File, folder: Path) -> bool:
    """Whether the official file is below the folder already, gzipped or not."""
    try:
        verified(data, file, folder)
    except (FileNotFoundError, ValueError):
        return False
    return True


def _shifted(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    """Progress within one archive as progress of the whole."""
    return lambda done: None if progress is None else progress(before + done, total)


def _fetch(archive: Archive, folder: Path, urls: Sequence[str], advance: Callable[[int], None]) -> Path:
    """An archive in its place, from the first server that gives the right bytes."""
    target = folder / archive.path
    if target.is_file() and md5_of(target) == archive.md5:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    failures = []
    for base in urls:
        url = f"{base.rstrip('/')}/{archive.remote}"
        failure = _receive_all(url, part, archive, advance)
        if not failure:
            _set_aside(target)
            part.replace(target)
            return target
        failures.append(f"{url}: {failure}")
    kept = f"; {part.stat().st_size} bytes are kept in {part}: call again to go on" if part.exists() else ""
    raise OSError(f"no server gave {archive.remote}: {'; '.join(failures) or 'urls names none'}{kept}")


def _set_aside(path: Path) -> None:
    """Keep a file that is not the official one under another name, if there is one."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.bad"))


def _receive_all(url: str, part: Path, archive: Archive, advance: Callable[[int], None]) -> str:
    """Bring the part to the whole archive; what went wrong, or nothing. A part with wrong bytes is removed."""
    fresh, reached = not part.exists(), -1
    while True:
        try:
            fresh = _receive(url, part, archive.size, advance) == 0 or fresh
        except (OSError, HTTPException) as error:
            return str(error) or type(error).__name__
        size = part.stat().st_size
        if size < archive.size:  # the line was cut: go on, as long as that brings anything
            if size <= reached:
                return f"it ends after {size} of {archive.size} bytes"
            reached = size
            continue
        got = md5_of(part)
        if got == archive.md5:
            return ""
        part.unlink()
        if fresh:
            return f"the md5 of what it gave is {got}, not {archive.md5}; it was removed"
        fresh, reached = True, -1  # the old part may have been the wrong one: once more, from the start


def _receive(url: str, part: Path, size: int, advance: Callable[[int], None]) -> int:
    """Append to the part what the server has from there on; the number of bytes that were kept of it."""
    have = part.stat().st_size if part.exists() else 0
    if have == size:
        return have
    headers = {"User-Agent": "ritz"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if have and error.code == 416:  # the server has no more than the part, or less: start again
            part.unlink()
            return _receive(url, part, size, advance)
        raise
    with response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise OSError(f"it gave {response.headers.get('Content-Range')} when asked for bytes from {have} on")
        kept = have if response.status == 206 else 0  # a server without ranges sends all of it again
        with part.open("ab" if kept else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                if file.tell() > size:
                    break
                advance(file.tell())
    if part.stat().st_size > size:
        part.unlink()
        raise OSError(f"it gave more than the {size} bytes of the official file")
    return kept


def _unpack(path: Path, data: DataSet, files: Sequence[File], folder: Path) -> None:
    """The files of the table out of an archive, each moved into its place once its checksum is right; no others."""
    wanted = {file.path: file for file in files if not _is_right(data, file, folder)}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() and member.name in wanted else None
            if content is None:
                continue
            file = wanted.pop(member.name)
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            with content, part.open("wb") as out:
                shutil.copyfileobj(content, out)
            if (got := md5_of(part)) != file.md5:
                part.unlink()
                raise ValueError(f"{file.path} in {path} has md5 {got}, not {file.md5}")
            _set_aside(target)
            part.replace(target)
    if wanted:
        raise ValueError(f"{path} does not hold {', '.join(wanted)}")
