"""Choices made once per run: how products are taken, not what they are."""

from dataclasses import dataclass
from typing import Literal, get_args

Route = Literal["auto", "forward", "reverse", "difference"]
Compile = bool | Literal["auto"]


@dataclass(frozen=True)
class Plan:
    """How products are computed. Plans with exact routes give the same numbers to round-off, at different cost.

    Attributes:
        route: How a Hessian product is computed: "forward" (forward over reverse), "reverse" (reverse over reverse),
            "difference" (central difference of gradients), or "auto" (the fastest that works, tried on one batch).
        chunk: Largest number of vectors in one batched product. More vectors share one forward pass but need more
            memory. A CPU uses fewer if their activations are large, because there large blocks of memory cost more
            than sharing saves.
        micro_batch: Largest number of samples in one piece of a batch; None uses whole batches until memory runs out.
        cache: Keep batches on the device; None keeps them if they fit in a third of the free memory. Unless False, an
            operator on a CPU also keeps what products of one batch share (its forward pass and gradient), up to 1 GiB
            and a quarter of the free memory, if all modules are torch.nn's or `ritz.models`' own; for few outputs, it
            keeps their derivatives, too, up to half a GiB. On a GPU, compiled products keep the same for at most
            sixteen batches, in a quarter of the free memory.
        replay: On a GPU, record the product of a batch, or its passes in an exact trace, as a CUDA graph and replay it.
            This is several times faster if the host cannot keep up with a small network. Each call of the model must
            run the same sequence of operations for inputs of one shape. None records if this is known (all modules are
            torch.nn's or `ritz.models`' own, no function of the user) and half of the device's memory is free, because
            recordings keep their memory.
        compile: Pass the product of a batch through torch.compile. This takes tens of seconds once, and the result is
            checked against the eager product; images use the channels-last layout if the model accepts it. As for
            `replay`, each call of the model must run the same sequence of operations. True compiles at once. "auto"
            compiles on a GPU, if this is known and the run is so long that the compilation takes at most a tenth of it
            (`RiskOperator.expect` announces the length). It does not compile on a CPU, where runs are bitwise
            reproducible, nor on several ranks. Batches of another size than the first run eagerly, and so does
            everything if compiling fails, with a line in the log.

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
