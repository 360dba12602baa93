"""Named parameters and flat rows.

Inside ritz a vector of parameters is a row of one contiguous (k, dim) tensor: k vectors side by side, each the
concatenation of the flattened parameters in `named_parameters` order. `ParamSpace` maps between the two and draws the
random probes.

Probes are keyed, not streamed: the number at (seed, index, parameter name, element) is a hash of those four, so a
probe is the same on every device and on any sharding, common to two checkpoints of one network, and the probe of a
block of layers is the restriction of the probe of the whole.
"""

import fnmatch
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from .comm import World

Distribution = Literal["rademacher", "normal"]

_PIECE = 1 << 14  # elements that a matrix product adds up by itself


@dataclass(frozen=True)
class ParamSpace:
    """The parameters a matrix acts on: their names and shapes, in the order of the flat vector.

    Example:
        >>> space = ParamSpace(("w", "b"), (torch.Size([2, 3]), torch.Size([2])))
        >>> space.dim, space.slices["b"]
        (8, slice(6, 8, None))
        >>> {name: tuple(t.shape) for name, t in space.split(torch.zeros(5, 8)).items()}
        {'w': (5, 2, 3), 'b': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> "ParamSpace":
        """The space of a dictionary of named tensors."""
        return cls(tuple(params), tuple(p.shape for p in params.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def dim(self) -> int:
        """Number of elements in all, the P of the papers."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        ends = itertools.accumulate(self.sizes)
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (k, dim) or one vector (dim,) as named tensors (k, *shape) or (*shape); views, no copy."""
        lead = rows.shape[:-1]
        parts = rows.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def join(self, params: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """The inverse of `split`; `lead` is the number of leading batch dimensions."""
        parts = [params[name] for name in self.names]
        return torch.cat([p.reshape(*p.shape[:lead], size) for p, size in zip(parts, self.sizes, strict=True)], dim=-1)

    def segment(self, rows: Tensor, first: int = 0) -> Tensor:
        """Sums of rows (k, dim) over each parameter: (k, num_params). Serves per-layer dots and norms.

        If the rows are only a part, the elements from `first` on, the sums are over that part.
        """
        last = first + rows.shape[-1]
        inside = [max(min(s.stop, last) - max(s.start, first), 0) for s in self.slices.values()]
        return torch.stack([part.sum(-1) for part in rows.split(inside, dim=-1)], dim=-1)

    def probes(
        self,
        indices: Sequence[int],
        seed: int,
        distribution: Distribution = "rademacher",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Random rows (len(indices), dim) with E[v v'] = I, one for each probe index.

        Args:
            indices: Which probes: the rows of (0, 1) and of (2,) together are those of (0, 1, 2).
            seed: Any integer.
            distribution: "rademacher" (signs; least variance for a trace) or "normal" (rotation invariant; normalised
                it is uniform on the sphere, which the bounds for a random start need).
        """
        if distribution not in get_args(Distribution):
            raise ValueError(f"distribution must be 'rademacher' or 'normal', got {distribution!r}")
        place = torch.device(device)
        rows = torch.empty(len(indices), self.dim, dtype=dtype, device=place)
        for index, row in zip(indices, rows.unbind(), strict=True):
            end = 0
            for names, sizes, first in self._runs(_DRAWN_AT_ONCE.get(place.type, 1 << 24)):
                keys = [(int(seed), int(index), name) for name in names]
                start, end = end, end + sum(sizes)
                row[start:end] = _draw(keys, sizes, first, distribution, place)
        return rows

    def origins(self, index: int, seed: int) -> Tensor:
        """The state from which `signs` computes the signs of a probe, (num_params,) int64."""
        keys = [(int(seed), int(index), name) for name in self.names]
        return _origins(keys, self.sizes)

    def signs(self, origins: Tensor) -> Tensor:
        """The row (dim,) of random signs of `probes`, on the device of its origins, without waiting for the host.

        Example:
            >>> space = ParamSpace(("w", "b"), (torch.Size([2, 3]), torch.Size([2])))
            >>> bool((space.signs(space.origins(4, seed=1)) == space.probes([4], seed=1)[0]).all())
            True
        """
        return _signs(_counters(origins, self.sizes))

    def _runs(self, most: int) -> Iterator[tuple[list[str], list[int], int]]:
        """Portions of at most `most` elements to draw at once: several parameters, or a part of one.

        Each is (names, sizes, first), where `first` is the first element of the first parameter.
        """
        names, sizes, room = list[str](), list[int](), most
        for name, size in zip(self.names, self.sizes, strict=True):
            if names and size > room:
                yield names, sizes, 0
                names, sizes, room = [], [], most
            if size > most:
                yield from (([name], [min(most, size - first)], first) for first in range(0, size, most))
            else:
                names.append(name)
                sizes.append(size)
                room -= size
        if names:
            yield names, sizes, 0


@dataclass(frozen=True)
class Shard:
    """A rank's part of every vector of a space: elements first ... last - 1 of the flat vector.

    Vectors that are kept, such as a Krylov basis, are kept in parts, so that the memory per rank falls with the number
    of ranks. A dot product is the sum over ranks of the dot products of the parts. With one rank, a part is the whole.

    Example:
        >>> from ritz.comm import SELF
        >>> shard = Shard(SELF, 5)
        >>> shard.first, shard.last, shard.whole(shard.part(torch.ones(1, 5))).tolist()
        (0, 5, [[1.0, 1.0, 1.0, 1.0, 1.0]])
    """

    world: World
    dim: int

    @property
    def first(self) -> int:
        """The first element of the part."""
        return self.world.rank * self.dim // self.world.size

    @property
    def last(self) -> int:
        """The end of the part, exclusive."""
        return (self.world.rank + 1) * self.dim // self.world.size

    @property
    def width(self) -> int:
        """The number of elements of the part."""
        return self.last - self.first

    def part(self, rows: Tensor) -> Tensor:
        """The part (..., width) of rows (..., dim); rows that are parts already stay as they are."""
        if self.world.size == 1 or rows.shape[-1] == self.width != self.dim:
            return rows
        return rows[..., self.first : self.last].contiguous()

    def whole(self, part: Tensor) -> Tensor:
        """Rows (..., dim) from the parts of all ranks."""
        if self.world.size == 1:
            return part
        parts = self.world.cat([part], part.device)
        return torch.cat([own for (own,) in parts], dim=-1)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of a few numbers that each computed from its part."""
        return self.world.sum(numbers)

    def norms(self, part: Tensor) -> Tensor:
        """Norms of the rows (k, dim), each rank giving its part of them, (k,) float64."""
        return self.sum(row_dots(part, part)).sqrt()

    def project_out(self, part: Tensor, basis: Tensor, times: int = 1) -> Tensor:
        """Rows projected off the orthonormal rows of `basis`; all are given as parts."""
        for _ in range(times):
            part = torch.addmm(part, self.sum(row_products(part, basis)).to(part.dtype), basis, alpha=-1)
        return part


def row_dots(left: Tensor, right: Tensor) -> Tensor:
    """Row by row products of (k, dim) tensors, (k,) float64; torch sums in a tree, so float32 is accurate enough.

    Example:
        >>> row_dots(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
        [11.0]
    """
    return (left * right).sum(-1).double()


def row_norms(rows: Tensor) -> Tensor:
    """Norms of rows, (k,) float64. `vector_norm` would sum float32 in order on a CPU, and lose digits.

    Example:
        >>> row_norms(torch.tensor([[3.0, 4.0]])).tolist()
        [5.0]
    """
    return row_dots(rows, rows).sqrt()


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Products of all rows (k, dim) with all rows (m, dim), (k, m) float64, added up in float64 piece by piece.

    One matrix product would sum float32 in order on a CPU: of 15 million squares, it loses a thousandth.

    Example:
        >>> row_products(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0]])).tolist()
        [[11.0], [4.0]]
    """
    size = max(_PIECE, 1 << max(0, left.shape[1].bit_length() - 14))  # at most 2^14 pieces
    whole = left.shape[1] // size * size
    found = (left[:, whole:] @ right[:, whole:].T).double()
    if whole:
        a, b = (rows[:, :whole].unflatten(1, (-1, size)).transpose(0, 1) for rows in (left, right))
        found += torch.bmm(a, b.mT).double().sum(0)
    return found


def select(names: Iterable[str], patterns: str | Sequence[str], others: Mapping[str, str] | None = None) -> list[str]:
    """The names that match at least one glob, in their own order.

    Args:
        names: To choose from.
        patterns: The globs.
        others: Other names of the same parameters, if these are tied; a match of any of their names counts.

    Raises:
        ValueError: If a pattern matches nothing.

    Example:
        >>> select(["conv.weight", "conv.bias", "fc.weight"], ["conv.*"])
        ['conv.weight', 'conv.bias']
        >>> select(["embedding.weight", "head.bias"], "head.*", {"head.weight": "embedding.weight"})
        ['embedding.weight', 'head.bias']
    """
    names = list(names)
    known = dict(zip(names, names, strict=True))
    known |= {other: name for other, name in (others or {}).items() if name in known}
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    if not globs:
        raise ValueError("no parameter is chosen: the list of patterns is empty")
    matched: set[str] = set()
    for glob in globs:
        if not (found := [known[name] for name in known if fnmatch.fnmatchcase(name, glob)]):
            raise ValueError(f"no parameter matches {glob!r}; there are: {', '.join(names[:20])}")
        matched.update(found)
    return [name for name in names if name in matched]


# elements at once; each needs some 30 bytes meanwhile, which on a CPU should stay in its cache
_DRAWN_AT_ONCE = {"cpu": 1 << 16}

Key = tuple[object, ...]


def _draw(
    keys: Sequence[Key], sizes: Sequence[int], first: int, distribution: Distribution, device: torch.device
) -> Tensor:
    """Random numbers of mean 0 and variance 1, `sizes[i]` of them from the stream named by `keys[i]`, side by side.

    The first stream is taken from its element `first` on.
    """

    def counters(*stream: str) -> Tensor:
        return _counters(_origins([(*key, *stream) for key in keys], sizes, first).to(device, non_blocking=True), sizes)

    if distribution == "rademacher":
        return _signs(counters())
    # Box-Muller; float64 so that the tails and every device agree
    radius = _uniform(_mixed(counters("radius"))).log_().mul_(-2).sqrt_()
    return radius.mul_(_uniform(_mixed(counters("angle"))).mul_(2 * math.pi).cos_())


def random_uniform(size: int, key: tuple[object, ...], device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """Uniform numbers in (0, 1), float64: elements start ... start + size - 1 of the stream named by `key`."""
    return _uniform(random_bits(size, key, device, start))


def random_permutation(size: int, key: tuple[object, ...], device: torch.device | str = "cpu") -> Tensor:
    """The numbers 0 ... size - 1 in the random order named by `key`.

    Example:
        >>> random_permutation(3, ("a", 0)).sort().values.tolist()
        [0, 1, 2]
    """
    return random_uniform(size, key, device).argsort()


def random_signs(size: int, key: tuple[object, ...], device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """Random signs, float32: elements start ... start + size - 1 of the stream named by `key`.

    Example:
        >>> random_signs(4, ("a", 0)).abs().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    return _signs(_counters(_origins([key], [size], start).to(device, non_blocking=True), [size]))


def random_bits(size: int, key: tuple[object, ...], device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """64 random bits for each element: SplitMix64 (Steele, Lea and Flood 2014) at counter = element.

    A counter-based generator, so an element does not depend on who draws it. Integer arithmetic wraps modulo 2^64.
    """
    return _mixed(_counters(_origins([key], [size], start).to(device, non_blocking=True), [size]))


def _counters(origins: Tensor, sizes: Sequence[int]) -> Tensor:
    """The counter of each element of several streams side by side, (sum of sizes,) int64; `_mixed` gives its bits.

    Example:
        >>> origins = _origins([("a",), ("b",)], [2, 3])
        >>> bits = torch.cat([random_bits(2, ("a",)), random_bits(3, ("b",))])
        >>> bool((_mixed(_counters(origins, [2, 3])) == bits).all())
        True
    """
    x = torch.arange(sum(sizes), dtype=torch.int64, device=origins.device).mul_(_signed(_STEP))
    if len(sizes) == 1:
        return x.add_(origins)
    return x.add_(torch.cat([own.expand(size) for own, size in zip(origins.unbind(), sizes, strict=True)]))


_STEP = 0x9E3779B97F4A7C15  # of the counter, from one element to the next


def _origin(key: Key) -> int:
    """The first counter of the stream of a key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True)


def _origins(keys: Sequence[Key], sizes: Sequence[int], first: int = 0) -> Tensor:
    """First counters of streams, if elements are numbered from element `first` of the first one, (len(keys),) int64."""
    starts = itertools.accumulate(sizes, initial=-first)
    own = [_signed((_origin(key) - start * _STEP) % (1 << 64)) for key, start in zip(keys, starts, strict=False)]
    return torch.tensor(own, dtype=torch.int64)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    x = _multiplied(x)
    return x.bitwise_xor_(_logical_shift(x, 31))


def _multiplied(x: Tensor) -> Tensor:
    """The finaliser without its last step, which does not change the first 31 bits; in place."""
    x ^= _logical_shift(x, 30)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= _logical_shift(x, 27)
    x *= _signed(0x94D049BB133111EB)
    return x


def _uniform(bits: Tensor) -> Tensor:
    """Numbers in (0, 1) from 52 of the bits: a float64 has room for these and the added half."""
    return _logical_shift(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _signs(x: Tensor) -> Tensor:
    """Signs as float32, -1 where the first of the mixed bits is set; overwrites the counters."""
    return _multiplied(x).bitwise_right_shift_(63).float().mul_(2).add_(1)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that fills with zeros; torch's own shift on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
