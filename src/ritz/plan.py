"""Choices made once per run: how products are taken, not what they are."""

from dataclasses import dataclass
from typing import Literal, get_args

Route = Literal["auto", "forward", "reverse", "difference"]
Compile = bool | Literal["auto"]


@dataclass(frozen=True)
class Plan:
    """How products are computed. Plans with exact routes give the same numbers to round-off, at other cost.

    Attributes:
        route: How a Hessian product is taken: "forward" (forward over reverse), "reverse" (reverse over reverse),
            "difference" (central difference of gradients), or "auto" (the fastest that works, tried on one batch).
        chunk: Vectors in one batched product, at most; more share one forward pass and cost memory. A CPU, where large
            blocks of memory cost more than is shared, takes fewer where their activations are many.
        micro_batch: Most samples in one piece of a batch; None takes batches whole until memory runs out.
        cache: Keep batches on the device; None keeps them when they fit in a third of the free memory. Unless False, an
            operator on a CPU also keeps what products of one batch share, its forward pass and gradient, up to 1 GiB
            and a quarter of the free memory, where all modules are torch.nn's or `ritz.models`' own; of few outputs
            their derivatives too, up to half a GiB. On a GPU compiled products keep it, of at most sixteen batches and
            in a quarter of the free memory.
        replay: On a GPU, record the product of a batch, or its passes in an exact trace, as a CUDA graph and replay it:
            several times faster where the host cannot keep up with a small network. Each call of the model must be the
            same sequence of operations for inputs of one shape; None records where that is known (all modules
            torch.nn's or `ritz.models`' own, no function of the user's), and where half of the device's memory is free,
            since recordings keep theirs.
        compile: Put the product of a batch through torch.compile, which takes tens of seconds once and is checked
            against the product as it is; images have their channels last then, where the model takes them so. As for
            `replay` each call of the model must be the same sequence of operations. True compiles at once; "auto" on a
            GPU, where that is known and the run is so long that the compilation is at most a tenth of it
            (`RiskOperator.expect` says how much is to come); not on a CPU, where runs are the same to the bit, nor on
            several ranks. Batches of another size than the first are taken as they are, and so is everything where
            compiling fails, with a line in the log.

    Example:
        >>> Plan(chunk=4).route
        'auto'
    """

    route: Route = "auto"
    chunk: int = 8
    micro_batch: int | None = None
    cache: bool | None = None
    replay: bool | None = None
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        if self.route not in get_args(Route):
            raise ValueError(f"route must be one of {', '.join(get_args(Route))}, got {self.route!r}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1 or None, got {self.micro_batch}")
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ValueError(f"compile must be True, False or 'auto', got {self.compile!r}")
