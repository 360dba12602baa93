"""Why are Hessian products of networks with ReLU far off in TF32? Its rounding, in float64, and what it decides.

TF32 keeps ten bits of both factors of a product. Here factors are rounded so in every pass, and all else is in float64.
ReLU and max-pooling choose: which units pass, which of four is the largest. With the choices of float64 given to the
rounded passes, what is left is the error of arithmetic; with those of the rounded pass given to float64, the error of
choices. Beside them: exact products at rounded weights, with their choices or the same, and products in float32.

    python benchmarks/tf32.py          minutes; writes benchmarks/results/tf32.json
    python benchmarks/tf32.py --quick  seconds: does it run?
"""

from typing import Any

import reports
import torch
from peers import accuracy, problems
from peers.problems import Problem
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import cross_entropy, max_pool2d
from torch.utils._python_dispatch import TorchDispatchMode

import ritz
from ritz.provenance import versions

FILE = "tf32.json"
PARTS = ("all", "arithmetic", "choices", "weights", "same choices", "float32")
aten = torch.ops.aten
FACTORS = {aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2), aten.mm: (0, 1), aten.addmm: (1, 2)}
AVERAGE = {nn.MaxPool2d: lambda: nn.AvgPool2d(2)}
CASES: dict[str, dict[str, Any]] = {  # VGG-16-BN at its first weights, and what is changed
    "as it is": {},
    **{f"32 images, {bits} bits": {"batch": 32, "bits": bits} for bits in (6, 8, 10, 12, 14)},
    "full width": {"width": 1.0},
    "smooth images": {"side": 4},
    "trained": {"trained": True, "batch": 32, "num_batches": 16},
    "average pooling": {"new": AVERAGE},
    "GELU": {"new": {nn.ReLU: nn.GELU}},
    "GELU, average pooling": {"new": {nn.ReLU: nn.GELU, **AVERAGE}},
    "softplus, average pooling": {"new": {nn.ReLU: nn.Softplus, **AVERAGE}},
    "no BatchNorm": {"network": "vgg16"},
    "WideResNet-28-1": {"network": "wide_resnet28_10", "width": 0.1},
}


def rounded(x: Tensor, bits: int = 10) -> Tensor:
    """To so many of the 23 bits of mantissa that float32 has; ties to even."""
    drop = 23 - bits
    whole = x.float().view(torch.int32)
    whole = (whole + (1 << drop - 1) - 1 + (whole >> drop & 1)) & -(1 << drop)
    return whole.view(torch.float32).to(x.dtype)


class Rounded(TorchDispatchMode):
    """Factors of convolutions and matrix products are rounded, in every pass."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = FACTORS.get(func.overloadpacket, ())
        return func(*(rounded(a, self.bits) if i in places else a for i, a in enumerate(args)), **(kwargs or {}))


class Choice(nn.Module):
    """ReLU or max-pooling that keeps what it chose, and goes by another choice where one is given."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.pool, self.given = pool, None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = max_pool2d(x.detach(), 2, return_indices=True)[1] if self.pool else x.detach() > 0
        chosen = self.seen if self.given is None else self.given
        return x.flatten(2).gather(2, chosen.flatten(2)).view(chosen.shape) if self.pool else x * chosen


def replaced(model: nn.Module, new: dict[Any, Any]) -> nn.Module:
    """With other modules in the place of those of some kinds."""
    for name, child in list(model.named_children()):
        setattr(model, name, new[type(child)]() if type(child) in new else replaced(child, new))
    return model


def make(width: float, batch: int, network: str = "vgg16_bn", side: int = 32, num_batches: int = 1,
         trained: bool = False, new: dict[Any, Any] | None = None) -> Problem:  # fmt: skip
    """As in `peers.problems`: noise, enlarged to 32 x 32 where it is smaller; in float64, its choices to be seen."""
    model = nn.Sequential(nn.Upsample(32, mode="bilinear"), getattr(ritz.models, network)(100, width=width, seed=0))
    problems.KINDS["tf32"] = problems.Kind(lambda: replaced(model, new or {}), (3, side, side), 100, batch)
    problem = problems.make("tf32", "cpu", num_batches)
    torch.manual_seed(0)  # for dropout
    problem = (accuracy.learned(problem) if trained else problem).to(torch.float64)
    replaced(problem.model, {nn.ReLU: lambda: Choice(pool=False), nn.MaxPool2d: lambda: Choice(pool=True)})
    return problem


def products(problem: Problem, given: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradient and Hessian product of the first batch, by passes in reverse; and what each layer would choose."""
    (x, y), params = problem.batches[0], list(problem.model.parameters())
    kinks = [module for module in problem.model.modules() if isinstance(module, Choice)]
    for i, kink in enumerate(kinks):
        kink.given = given[i] if given else None
    draw = torch.Generator().manual_seed(2)
    v = [torch.randn(p.shape, generator=draw, dtype=torch.float32).to(p.dtype) for p in params]
    gradient = grad(cross_entropy(problem.model(x), y), params, create_graph=True)
    g, image = (torch.cat([p.detach().flatten() for p in parts]) for parts in (gradient, grad(gradient, params, v)))
    return g, image, [kink.seen for kink in kinks]


def compared(problem: Problem, bits: int) -> dict[str, Any]:
    """Relative distances from float64, how many would choose otherwise, and their shares by layer in TF32."""
    (*exact, choices), near = products(problem), problem.to(torch.float64)
    for p in near.model.parameters():
        p.data = rounded(p.data, bits)
    with Rounded(bits):
        found = {"all": products(problem), "arithmetic": products(problem, choices)}
    others = found["all"][2]
    found |= {"choices": products(problem, others), "weights": products(near), "same choices": products(near, choices)}
    found["float32"] = products(problem.to(torch.float32))
    row: dict[str, Any] = {"shares": [float((a != b).double().mean()) for a, b in zip(choices, others, strict=True)]}
    for name, (*vectors, seen) in found.items():
        far = [float((vector - known).norm() / known.norm()) for vector, known in zip(vectors, exact, strict=True)]
        flips = sum(int((a != b).sum()) for a, b in zip(choices, seen, strict=True))
        row[name] = {"gradient": far[0], "Hessian": far[1], "flips": flips}
    return row


def main() -> None:
    parser = reports.parser(__doc__, "one narrow network, seconds: does it run?", page=False)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    if args.quick:
        args.cases, args.width, args.batch, args.out = ["as it is"], 0.0625, 4, reports.QUICK
    torch.set_num_threads(1)
    about, rows = reports.about(args, ("cases", "width", "batch")), []
    print(f"{'Hessian products off by':28}" + "".join(f"{name:>13}" for name in PARTS))
    for case in args.cases:
        options = {"bits": 10, "width": args.width, "batch": args.batch, **CASES[case]}
        found = compared(bits=options.pop("bits"), problem=make(**options))
        rows.append({"case": case, "width": options["width"], "batch": options["batch"], **found})
        print(f"{case:28}" + "".join(f"{rows[-1][name]['Hessian']:13.1e}" for name in PARTS), flush=True)
    reports.write({**about, "versions": versions(), "rows": reports.rounded(rows, ".3g")}, args.out / FILE)


if __name__ == "__main__":
    main()
