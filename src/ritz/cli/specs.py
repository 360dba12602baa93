"""What can be typed: one frozen dataclass a command, parsed by tyro, given to the command and saved with the run.

No torch here: `ritz --help` reads this module.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tyro.conf import FlagCreatePairsOff, Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

Dtype = Literal["bfloat16", "float16", "float32", "float64"]
_SCREEN = ("out", "json", "workers", "slurm")  # where the answer goes, and how it is come by: no part of what a run is

Switch = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Function = Annotated[str | None, arg(metavar="FILE.py:FUNCTION", help_behavior_hint="")]
_DTYPE = PrimitiveConstructorSpec[Any](  # tyro's own would offer None as a word, and in no order
    nargs=1, metavar="float32|float64|...", instance_from_str=lambda words: words[0],
    is_instance=lambda value: value is None or value in get_args(Dtype), str_from_instance=lambda value: [str(value)],
    choices=get_args(Dtype),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    risk: Annotated[Positional[str], arg(metavar="FILE.py:FUNCTION")]
    """A function of yours that returns a ritz.Risk. Your file is imported, which runs the code in it."""
    device: Annotated[str | None, arg(metavar="cpu|cuda|...", help_behavior_hint="")] = None
    """Device of the computation; by default that of the risk."""
    dtype: Annotated[Dtype | None, _DTYPE, arg(help_behavior_hint="")] = None
    """Precision of the computation; by default that of the risk."""
    seed: int = 0
    """Seed of the probes; torch's generators are seeded with it, too, before your function is called."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder of the run; by default ritz-runs/COMMAND-1, -2, ... The same run is resumed, another is refused."""
    json: Switch = False
    """Print one JSON object on stdout, and nothing else."""

    def settings(self) -> dict[str, Any]:
        """All that is part of what the run is."""
        return {name: value for name, value in asdict(self).items() if name not in _SCREEN}


@dataclass(frozen=True, kw_only=True)
class Measures(Common):
    """What is measured, and at what cost."""

    measures: Annotated[tuple[str, ...], arg(metavar="standard|all|KEY ...")] = ("standard",)
    """The standard set, all, or some by key; `standard KEY` is the set and one more."""
    num_steps: int = 100
    """Lanczos steps per probe: the resolution of the spectrum."""
    num_probes: int = 8
    """Number of probes: the accuracy of averages."""

    @property
    def chosen(self) -> list[str]:
        """The measures as the library takes them; commas may stand between keys."""
        return [key for word in self.measures for key in word.split(",") if key]


@dataclass(frozen=True, kw_only=True)
class Outcome(Measures):
    """What `measure` and `compare` can be told beside the solution."""

    test: Function = None
    """A function that returns a risk on test data; it is evaluated at the weights being measured."""
    init: File = None
    """The initial weights of training, for distances."""


@dataclass(frozen=True, kw_only=True)
class MeasureSpec(Outcome):
    """Measure one solution: curvature, margins, norms and gaps, each with its error bar and how to read it."""

    weights: File = None
    """Weights to measure, .safetensors or .pt; by default those of the risk."""
    audit: Switch = False
    """Also measure at other weights with the same function, to show which measures change."""
    sample_traces: Switch = False
    """Also compute the Hessian trace of every sample."""


@dataclass(frozen=True, kw_only=True)
class CompareSpec(Outcome):
    """Rank checkpoints of one model by each measure, and mark differences beyond the error bars."""

    weights: Annotated[tuple[Path, ...], arg(metavar="FILE FILE ...")]
    """Two or more files of weights, .safetensors or .pt."""
    workers: int = 1
    """Number of solutions at a time, each in its own process on the same device."""
    slurm: Annotated[str | None, arg(metavar="PARTITION", help_behavior_hint="")] = None
    """Measure every solution as a SLURM job of this partition; needs submitit. All machines must see --out, the risk
    and the weights."""

    @property
    def apart(self) -> bool:
        """Whether solutions are measured in processes of their own."""
        return self.workers > 1 or self.slurm is not None

    def check(self) -> None:
        """Refuse what cannot be, before anything is loaded."""
        if len(self.weights) < 2:
            given = self.weights[0] if self.weights else "no file"
            raise ValueError(f"--weights has {given} and nothing to compare with; give two or more files after it")
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}; 1 measures one after another")


@dataclass(frozen=True, kw_only=True)
class SpectrumSpec(Common):
    """The spectral density of the Hessian, or of the Gauss-Newton matrix, with trace, norms and extreme eigenvalues."""

    weights: File = None
    """Weights, .safetensors or .pt; by default those of the risk."""
    matrix: Literal["hessian", "ggn"] = "hessian"
    """Which matrix."""
    params: Annotated[str, arg(metavar="GLOB")] = "*"
    """Parameters by name, for a block of the matrix."""
    num_steps: int = 100
    """Lanczos steps per probe: the resolution of the spectrum."""
    num_probes: int = 8
    """Number of probes: the accuracy of averages."""
    products: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Spend this many matrix-vector products instead."""
    tol: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Add probes until Tr H and Tr H^2 are known to this relative error."""

    def check(self) -> None:
        """Refuse what the library would refuse, before there is a folder."""
        for name, least in (("num_steps", 1), ("num_probes", 1), ("products", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}; give more")
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"--tol must be positive, got {self.tol}; 0.01 is one per cent")


@dataclass(frozen=True, kw_only=True)
class DoctorSpec(Measures):
    """Check a risk before a long run: is it deterministic and sound, which route is fastest, what will it cost?"""

    weights: File = None
    """Weights, .safetensors or .pt; by default those of the risk."""
