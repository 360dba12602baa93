"""Language models of a hundred million and of a billion parameters on one device: spectra, layers, time, memory.

    python benchmarks/large.py --device cuda --data FOLDER            GPT-2 small and a Llama of 1.1 billion parameters
    python benchmarks/large.py --quick                                the same on tiny ones, seconds on a CPU
    python benchmarks/large.py --page benchmarks/results docs         large.md, from the file

The models are those of the transformers package, at random weights. The data is a text, its bytes as tokens: the file
tinyshakespeare.txt under FOLDER/text, or random bytes where no folder is given. Before anything is timed one quadratic
form v'Gv is held against float64: central differences of the logits, and the curvature of cross-entropy in closed form.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reports import QUICK, parser, read, write_tree
from torch import Tensor, nn

import ritz
from ritz import provenance
from ritz.integrations.transformers import causal_lm

FILE = "large.json"
Batches = list[dict[str, Tensor]]


# ---------------------------------------------------------------------------------------------- models and text


def gpt2(tiny: bool) -> nn.Module:
    """GPT-2 small: 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300} if tiny else {}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **small))  # type: ignore[no-any-return]


def llama(tiny: bool) -> nn.Module:
    """The shape of TinyLlama: 22 layers of width 2,048, 4 key-value heads, 1.1 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    if tiny:
        shape = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 8}
    words = 300 if tiny else 32000
    return LlamaForCausalLM(  # type: ignore[no-any-return]
        LlamaConfig(vocab_size=words, num_key_value_heads=4, use_cache=False, **shape)
    )


MODELS = {"GPT-2 small": gpt2, "Llama, 1.1 billion": llama}


def text(args: argparse.Namespace) -> Batches:
    """Batches of tokens (batch_size, tokens): pieces of a text that lie evenly in it."""
    count, size = args.batches * args.batch_size, args.tokens
    if args.data is None:
        stream = torch.randint(256, (count * size,), generator=torch.Generator().manual_seed(0))
    else:
        written = (args.data / "text" / "tinyshakespeare.txt").read_bytes()
        stream = torch.frombuffer(bytearray(written), dtype=torch.uint8).long()
    starts = torch.linspace(0, len(stream) - size, count).long()
    rows = torch.stack([stream[start : start + size] for start in starts.tolist()]).to(args.device)
    return [{"input_ids": piece} for piece in rows.split(args.batch_size)]


def precise_form(model: nn.Module, batch: dict[str, Tensor], rows: Tensor, tokens: int) -> float:
    """v'Gv of the first tokens of a batch in float64, from central differences of the logits; the model is restored."""
    ids, params = batch["input_ids"][:1, :tokens], list(model.parameters())
    moves = [part.view_as(p) for part, p in zip(rows[0].split([p.numel() for p in params]), params, strict=True)]
    kept = [p.data for p in params]
    model.double()

    @torch.no_grad()
    def logits(step: float) -> Tensor:
        for p, start, move in zip(params, kept, moves, strict=True):
            p.data = start.double() + step * move.double()
        return model(input_ids=ids).logits[0, :-1]  # type: ignore[no-any-return]

    step = 1e-5  # some models compute their norms in float32, whatever they hold
    moved = (logits(step) - logits(-step)) / (2 * step)
    share = logits(0.0).softmax(-1)
    model.float()
    for p, start in zip(params, kept, strict=True):
        p.data = start
    return float(((share * moved**2).sum(-1) - (share * moved).sum(-1) ** 2).mean())


# ------------------------------------------------------------------------------------------------- measuring


class Meter:
    """Seconds and gigabytes of what is run, on a device."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, dict[str, float | None]]:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = self.now()
        found = work()
        seconds = self.now() - start
        return found, {"seconds": seconds, "GiB": torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else None}

    def now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def study(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One model: rows of what was run, each as soon as it is known."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = MODELS[name](args.quick).eval()
    batches, meter = text(args), Meter(args.device)
    risk = causal_lm(model, batches)
    G = ritz.GGN(risk)

    def row(what: str, work: Callable[[], Any], tell: Callable[[Any], dict[str, Any]] = lambda _: {}) -> dict[str, Any]:
        found, cost = meter(work)
        known = {"model": name, "parameters": risk.dim, "what": what, **cost, **tell(found)}
        print(json.dumps({key: value for key, value in known.items() if key != "layers"}), flush=True)
        return known

    yield row("v'Gv held against float64", lambda: _agreement(model, batches[0], args), dict)
    gradients = [meter(risk.gradient)[1]["seconds"] or 0.0 for _ in range(4)][1:]
    yield {"model": name, "parameters": risk.dim, "what": "gradient", "seconds": statistics.median(gradients)}
    probe = G.probes([0], seed=1)
    G.rows(probe)  # what is made for the first time
    yield row("one product with G", lambda: G.rows(probe))
    if risk.dim < args.most:
        H = ritz.Hessian(risk)
        H.rows(probe)
        yield row("one product with H", lambda: H.rows(probe))
        del H
        yield row("spectrum of G, default run, 4 probes",
                  lambda: ritz.spectrum(G, num_steps=args.steps, num_probes=4), _told)  # fmt: skip
    else:
        lean = {"num_steps": args.steps, "num_probes": 1, "reorthogonalize": "none"}
        yield row("spectrum of G, no basis, 1 probe", lambda: ritz.spectrum(G, **lean), _told)
    yield row("traces of the layers of G", lambda: ritz.trace(G, "hutchinson", num_probes=args.probes), _layers)


def _agreement(model: nn.Module, batch: dict[str, Tensor], args: argparse.Namespace) -> dict[str, Any]:
    tokens = min(args.tokens, 64)
    short = causal_lm(model, [{"input_ids": batch["input_ids"][:1, :tokens]}])
    G = ritz.GGN(short)
    rows = G.probes([0], seed=3)
    ours = float((rows * G.rows(rows)).sum())
    truth = precise_form(model, batch, rows, tokens)
    return {"v'Gv": ours, "float64": truth, "error": abs(ours / truth - 1)}


def _told(found: ritz.Spectrum) -> dict[str, Any]:
    return {
        "products": found.products, "stop": found.stop, "trace": float(found.trace.value),
        "stderr": float(found.trace.stderr), "lambda_max": float(found.lambda_max.value),
    }  # fmt: skip


def _layers(found: ritz.Estimate) -> dict[str, Any]:
    parts = {name: [float(part.value), float(part.stderr)] for name, part in (found.parts or {}).items()}
    return {"products": found.products, "trace": float(found.value), "stderr": float(found.stderr), "layers": parts}


# -------------------------------------------------------------------------------------------------- the page


def page(results: Path, docs: Path) -> None:
    """large.md from the file."""
    report = read(results / FILE)
    said = report["settings"]
    intro = f"""
        The tables show time and memory on one device: {report["machine"]["device_name"]}, torch
        {report["versions"]["torch"]}, transformers {report["versions"]["transformers"]}, commit {report["commit"]}. All
        runs are in float32, with TF32 in matrix products {"on" if said["tf32"] else "off"}. The data are
        {said["batches"]} batches of {said["batch_size"]} sequences of {said["tokens"]} tokens, and the weights are
        random. "in gradients" is the time divided by that of a gradient of the same data in the same process. GiB is
        the peak memory on the device, including model and vectors. The page is written by `python benchmarks/large.py
        --page benchmarks/results docs` from `benchmarks/results/{FILE}`."""
    out = ["# Large models", "", textwrap.fill(textwrap.dedent(intro).strip(), 120), ""]
    for name in dict.fromkeys(row["model"] for row in report["rows"]):
        own = [row for row in report["rows"] if row["model"] == name]
        out += [f"## {name}", "", f"{own[0]['parameters']:,} parameters.", "", *_costs(own), "", *_findings(own), ""]
    (docs / "large.md").write_text("\n".join(out).rstrip() + "\n", encoding="utf8")
    print(f"wrote {docs / 'large.md'}")


def _costs(rows: list[dict[str, Any]]) -> list[str]:
    unit = next(row["seconds"] for row in rows if row["what"] == "gradient")
    lines = ["| what | seconds | in gradients | products | GiB |", "| --- | --- | --- | --- | --- |"]
    for row in rows[1:]:
        size = f"{row['GiB']:.1f}" if row.get("GiB") else ""
        times = f"{row['seconds'] / unit:.3g}"
        lines.append(f"| {row['what']} | {row['seconds']:.3g} | {times} | {row.get('products', '')} | {size} |")
    return lines


def _findings(rows: list[dict[str, Any]]) -> list[str]:
    by = {row["what"].partition(",")[0]: row for row in rows}
    first, spectrum, layers = rows[0], by["spectrum of G"], by["traces of the layers of G"]
    said = f"""
        One quadratic form v'Gv is {first["v'Gv"]:.6g} here and {first["float64"]:.6g} in float64 by
        differences, a relative difference of {first["error"]:.1e}. The largest eigenvalue is
        {spectrum["lambda_max"]:.4g}. The trace is {layers["trace"]:.4g} +- {layers["stderr"]:.2g} from
        {layers["products"]} probes. The parameters with the largest shares of the trace are:"""
    most = sorted(layers["layers"].items(), key=lambda item: -item[1][0])[:5]
    table = ["| parameter | trace | standard error |", "| --- | --- | --- |"]
    table += [f"| `{name}` | {value:.4g} | {error:.1g} |" for name, (value, error) in most]
    return [textwrap.fill(textwrap.dedent(said).strip(), 120), "", *table]


def run(args: argparse.Namespace) -> None:
    import transformers

    names = ("quick", "batches", "batch_size", "tokens", "steps", "probes", "most", "tf32", "models")
    report: dict[str, Any] = {
        "settings": {name: getattr(args, name) for name in names} | {"text": args.data is not None},
        "commit": args.commit or provenance.own_commit(),
        "versions": provenance.versions() | {"transformers": transformers.__version__},
        "machine": provenance.machine(args.device),
        "rows": [],
    }
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    for name in args.models:
        for row in study(name, args):
            report["rows"].append(row)
            write_tree(report, args.out / FILE)
    print(f"wrote {args.out / FILE}")


def main() -> None:
    options = parser(__doc__, "tiny models, seconds: does it run?")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--batches", type=int, default=4)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--probes", type=int, default=8, help="for the traces of layers")
    options.add_argument("--most", type=int, default=500_000_000, help="parameters up to which a basis is kept")
    options.add_argument("--no-tf32", dest="tf32", action="store_false")
    options.add_argument("--data", type=Path, help="a folder with text/tinyshakespeare.txt")
    args = options.parse_args()
    if args.page:
        page(*args.page)
        return
    if importlib.util.find_spec("transformers") is None:
        options.exit(0 if args.quick else 2, "the models are those of transformers, which is not installed\n")
    if args.quick:
        args.out, args.batch_size, args.tokens, args.steps, args.most = QUICK, 2, 16, 10, 50_000
    run(args)
    if args.quick:
        page(args.out, args.out)


if __name__ == "__main__":
    main()
