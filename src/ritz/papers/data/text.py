"""Tiny Shakespeare, 1.1 MB of plays: the text that small language models are trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ...space import random_bits
from .catalogue import DataSet, find
from .files import verified

Level = Literal["characters", "bytes"]


@dataclass(frozen=True, eq=False)
class Text:
    """A text as codes, one for each byte: 90 % to train on, the rest to validate.

    Args:
        train, val: Codes (N,) uint8.
        vocabulary: The byte that each code stands for.

    Example:
        >>> text = Text(torch.tensor([0, 1, 1], dtype=torch.uint8), torch.tensor([], dtype=torch.uint8), b"ab")
        >>> text.decode(text.train), text.encode("ba").tolist()
        ('abb', [1, 0])
    """

    train: Tensor
    val: Tensor
    vocabulary: bytes

    def encode(self, text: str) -> Tensor:
        """Codes of a text, on the device of the training text.

        Raises:
            ValueError: If the vocabulary lacks one of its bytes.
        """
        raw = text.encode()
        if strange := sorted(set(raw) - set(self.vocabulary)):
            raise ValueError(f"the vocabulary of {len(self.vocabulary)} has no {bytes(strange)!r}")
        codes = bytes(self.vocabulary.index(byte) for byte in raw)
        return torch.tensor(list(codes), dtype=torch.uint8, device=self.train.device)

    def decode(self, codes: Tensor) -> str:
        """The text of codes (N,); bytes that are no text are shown as �."""
        return bytes(self.vocabulary[code] for code in codes.tolist()).decode(errors="replace")


def load_text(
    name: str | DataSet = "tinyshakespeare",
    root: Path | str | None = None,
    device: torch.device | str = "cpu",
    level: Level = "characters",
) -> Text:
    """A text split into its first 90 % and the rest, as codes on a device.

    Args:
        name: "tinyshakespeare", or a row of one's own.
        root: A folder with text/tinyshakespeare.txt, gzipped or not; None takes RITZ_DATA.
        device: Where to put the codes.
        level: "characters" numbers those that occur, in order: 65 in tiny Shakespeare, which is ASCII; "bytes" has
            all 256.

    Raises:
        FileNotFoundError: If the file is missing; it says where it was looked for and how to get it.
        ValueError: If the file is not the official one, or there is no such level.

    Example:
        >>> load_text(root="nowhere")
        Traceback (most recent call last):
        FileNotFoundError: neither tinyshakespeare.txt nor tinyshakespeare.txt.gz is in nowhere/text; ...
    """
    data = find(name)
    if data.form != "text":
        raise ValueError(f"{data.name} is not a text: read it with load")
    if level not in get_args(Level):
        raise ValueError(f"level must be 'characters' or 'bytes', got {level!r}")
    raw = verified(data, data.train[0], root)
    vocabulary = bytes(sorted(set(raw))) if level == "characters" else bytes(range(256))
    code_of = bytes(max(vocabulary.find(byte), 0) for byte in range(256))
    codes = torch.frombuffer(bytearray(raw.translate(code_of)), dtype=torch.uint8).to(device)
    cut = len(codes) * 9 // 10
    return Text(codes[:cut], codes[cut:], vocabulary)


def windows(codes: Tensor, length: int, count: int, key: tuple[object, ...]) -> tuple[Tensor, Tensor]:
    """Random windows of a text and what follows each place: inputs and targets (count, length) int64.

    Args:
        codes: The text (N,).
        length: Of a window.
        count: How many.
        key: Names the draw, as (seed, step): the same key gives the same windows on any device.

    Raises:
        ValueError: If the text is no longer than a window.

    Example:
        >>> inputs, targets = windows(torch.arange(10), length=4, count=3, key=(0, 0))
        >>> bool((targets == inputs + 1).all()), inputs.shape
        (True, torch.Size([3, 4]))
    """
    _need_room(codes, length)
    starts = random_bits(count, ("text windows", *key), codes.device).remainder_(len(codes) - length)
    return _at(codes, starts, length)


def all_windows(codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The text cut into windows side by side, inputs and targets (N, length) int64; a shorter rest is left out.

    Example:
        >>> all_windows(torch.arange(10), length=4)[0].tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    _need_room(codes, length)
    return _at(codes, torch.arange(0, len(codes) - length, length, device=codes.device), length)


def _need_room(codes: Tensor, length: int) -> None:
    """Refuse a text without one window and what follows it."""
    if length < 1 or len(codes) <= length:
        raise ValueError(f"a window of {length} and what follows it do not fit into a text of {len(codes)}")


def _at(codes: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Windows at their starts (count,), and the same one place on."""
    place = starts[:, None] + torch.arange(length + 1, device=codes.device)  # (count, length + 1)
    seen = codes[place].long()
    return seen[:, :-1], seen[:, 1:]
