"""Output that nobody reads any more, or that cannot have every sign: both end no work.

`ritz measure ... | head` ends the reading. A file or terminal in an encoding of few signs (LC_ALL=C, Windows' cp1252)
is written to in those that it has.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

_PLAIN = str.maketrans({"±": "+-", "×": "x", "█": "#", "─": "-", "−": "-", "…": "..."})  # of tables and bars


class _Lasting:
    """A stream whose reader may leave, and whose encoding may be poor: what is written then goes nowhere, or plain."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._left():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                known = text.translate(_PLAIN).encode(error.encoding, "replace")
                self._stream.write(known.decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._left():
            self._stream.flush()

    @contextlib.contextmanager
    def _left(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # with what the stream still holds
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Inside, stdout and stderr can be written to whether anybody reads them or not.

    Example:
        >>> with lasting():
        ...     print("read by who likes to")
        read by who likes to
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Lasting(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
