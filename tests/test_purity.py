"""No public call leaves a trace: not on the model, not on a generator, not on torch's switches; not when it fails."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import Calls
from torch import nn

import ritz
from ritz.estimators.noise import minibatch_moment
from ritz.measures.subject import Settings, Subject
from ritz.operators import BatchNoise

pytestmark = pytest.mark.filterwarnings("ignore::ritz.errors.NumericalWarning")


class Boom(Exception):
    """What the fuse throws; no error that a library would expect."""


class Fuse(nn.Module):
    """Passes its input on, and fails at a given call."""

    def __init__(self):
        super().__init__()
        self.left = Calls()  # calls until it fails

    def forward(self, x):
        if self.left:
            self.left[0] -= 1
            if self.left[0] == 0:
                raise Boom
        return x


def studied() -> nn.Module:
    """A model in the middle of training, with everything on it that a call could disturb."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), Fuse(), nn.Linear(6, 3))
        model = nn.Sequential(*layers)
        model(torch.randn(8, 4)).square().mean().backward()
    model[0].weight.requires_grad_(False)
    model[0].eval()  # mixed modes
    model[0].register_forward_hook(lambda module, args, out: None)
    model[2].register_forward_pre_hook(lambda module, args: None)
    model[5].register_full_backward_hook(lambda module, grad_in, grad_out: None)
    model[5].register_full_backward_pre_hook(lambda module, grad_out: None)
    model[5].weight.register_hook(lambda grad: None)
    return model


def state(model: nn.Module) -> dict[str, Any]:
    """All that must be as it was, by name; tensors as bytes, objects by identity."""
    found: dict[str, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad)
        found[f"{name} values"] = tensor.detach().numpy().tobytes()
        found[f"{name} grad"] = None if tensor.grad is None else tensor.grad.numpy().tobytes()
        found[f"{name} hooks"] = list(tensor._backward_hooks or ())
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.endswith("hooks") or "hooks_with_kwargs" in key:
                found[f"{name}.{key}"] = (id(value), [(k, id(v)) for k, v in value.items()])
            elif key not in ("_parameters", "_buffers", "_modules", "left"):
                found[f"{name}.{key}"] = value
    found["torch"] = torch.get_rng_state().numpy().tobytes()
    found["numpy"] = np.random.get_state()[1].tobytes(), np.random.get_state()[2]  # noqa: NPY002
    found["python"] = random.getstate()
    found["switches"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*before, *after}) if before.get(key, "absent") != after.get(key, "absent")]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, generator=generator), torch.randint(3, (12,), generator=generator)


# every public function, as a call on a risk
CALLS: dict[str, Callable[[ritz.Risk], Any]] = {
    "loss": lambda risk: risk.loss(),
    "gradient": lambda risk: risk.gradient(),
    "check": lambda risk: risk.at({}).check(),
    "at": lambda risk: risk.at(torch.ones(risk.dim)).loss(),
    "restrict": lambda risk: ritz.Hessian(risk.restrict("5.*")).dense(),
    "to": lambda risk: risk.to(dtype=torch.float32).gradient(),
    "Hessian": lambda risk: ritz.Hessian(risk) @ torch.ones(risk.dim),
    "Hessian forward": lambda risk: ritz.Hessian(risk, route="forward") @ torch.ones(risk.dim, 3),
    "Hessian reverse": lambda risk: ritz.Hessian(risk, route="reverse") @ torch.ones(risk.dim, 3),
    "Hessian difference": lambda risk: ritz.Hessian(risk, route="difference") @ torch.ones(risk.dim),
    "GGN": lambda risk: ritz.GGN(risk) @ torch.ones(risk.dim, 2),
    "Fisher": lambda risk: ritz.Fisher(risk, num_samples=2) @ torch.ones(risk.dim),
    "EmpiricalFisher": lambda risk: ritz.EmpiricalFisher(risk) @ torch.ones(risk.dim),
    "GradientCovariance": lambda risk: ritz.GradientCovariance(risk) @ torch.ones(risk.dim),
    "BatchNoise": lambda risk: BatchNoise(ritz.GGN(risk), 1) @ torch.ones(risk.dim),
    "KFACOperator": lambda risk: ritz.KFACOperator(risk) @ torch.ones(risk.dim),
    "block": lambda risk: ritz.GGN(risk).block("5.*").dense(),
    "to_scipy": lambda risk: ritz.GGN(risk).to_scipy() @ np.ones(risk.dim),
    "block_spectra": lambda risk: ritz.block_spectra(ritz.Hessian(risk), num_steps=2, num_probes=2),
    "spectrum": lambda risk: ritz.spectrum(ritz.Hessian(risk), num_steps=4, num_probes=2),
    "trace": lambda risk: ritz.trace(ritz.GGN(risk)),
    "trace hutchinson": lambda risk: ritz.trace(ritz.Hessian(risk), "hutchinson", num_probes=4),
    "trace hutch++": lambda risk: ritz.trace(ritz.Hessian(risk), "hutch++", num_probes=6),
    "trace xtrace": lambda risk: ritz.trace(ritz.Hessian(risk), "xtrace", num_probes=6),
    "trace exact": lambda risk: ritz.trace(ritz.GGN(risk), "exact"),
    "frobenius_norm": lambda risk: ritz.frobenius_norm(ritz.Hessian(risk), num_probes=4),
    "diagonal": lambda risk: ritz.diagonal(ritz.GGN(risk), num_probes=4),
    "logdet": lambda risk: ritz.logdet(ritz.GGN(risk), shift=0.1),
    "top_eigenpairs": lambda risk: ritz.top_eigenpairs(ritz.Hessian(risk), k=2),
    "solve": lambda risk: ritz.solve(ritz.GGN(risk) + 1.0, torch.ones(risk.dim)),
    "sample_traces": lambda risk: ritz.sample_traces(risk),
    "sample_traces probes": lambda risk: ritz.sample_traces(risk, method="probes", num_probes=2),
    "curvature_noise": lambda risk: ritz.curvature_noise(risk, num_batches=3, batch_size=4),
    "minibatch_moment": lambda risk: minibatch_moment(risk, num_pairs=2, batch_size=4),
    "measure": lambda risk: measured(risk, "all"),
    "compare": lambda risk: ritz.compare({"a": risk, "b": risk.at({})}, data(), measures=["trace", "test_loss"]),
    "audit": lambda risk: ritz.audit(risk, measures=["trace", "aceht"]),
    "track": lambda risk: ritz.track(risk, every=1, measures=["trace", "train_loss"], budget=1.0).step(),
    "rescale": lambda risk: ritz.transforms.rescale(risk, 2.0).loss(),
    "permute": lambda risk: ritz.transforms.permute(risk).loss(),
    "scale_output": lambda risk: ritz.transforms.scale_output(risk, 2.0).loss(),
    "margin_study": lambda risk: ritz.measures.margin_study(risk, num_samples=12),
    "line": lambda risk: ritz.landscape.line(risk, ritz.landscape.filter_normalised(risk), radius=1.0, num=3),
    "plane": lambda risk: ritz.landscape.plane(risk, *torch.eye(risk.dim)[:2], radius=1.0, num=3),
    "interpolate": lambda risk: ritz.landscape.interpolate(risk, torch.ones(risk.dim), num=3),
}
# have no meaning with batch statistics or masks
NO_SAMPLES = {"sample_traces", "sample_traces probes", "trace exact", "margin_study"}
SURVIVING = {"measure", "compare", "audit", "track"}  # go on when one measure fails


def measured(risk: ritz.Risk, measures: Any) -> Any:
    """Measures in little time."""
    return ritz.measure(risk, data(), risk.params(), measures=measures, num_steps=3, num_probes=2)


@pytest.mark.parametrize("keywords", [{}, {"mode": "train"}, {"dropout": True}], ids=["eval", "train", "dropout"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_no_trace(name, keywords):
    if keywords and name in NO_SAMPLES:
        pytest.skip("not defined sample by sample")
    if keywords.get("dropout") and name == "permute":
        pytest.skip("a frozen mask belongs to a unit, so units cannot be permuted")
    model = studied()
    before = state(model)
    CALLS[name](ritz.Risk(model, nn.CrossEntropyLoss(), data(), batch_size=4, **keywords))
    assert changes(before, state(model)) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_half_way_leaves_no_trace(name):
    model = studied()
    before = state(model)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data(), batch_size=4)
    risk.check()
    model[4].left[:] = [3]  # in the middle of a walk over three batches
    with contextlib.suppress(Boom) if name in SURVIVING else pytest.raises(Boom):
        CALLS[name](risk)
    assert changes(before, state(model)) == []
    model[4].left.clear()
    assert risk.loss() == pytest.approx(ritz.Risk(model, nn.CrossEntropyLoss(), data()).loss())  # and the risk is sound


def test_no_measure_that_fails_half_way_leaves_a_trace():
    model = studied()
    before = state(model)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), data(), batch_size=4)
    risk.check()
    failed = set()
    for key, row in ritz.measures.MEASURES.items():
        model[4].left[:] = [2]
        try:
            row.compute(Subject(risk, risk, risk.space.join(risk.params()), Settings(num_steps=3, num_probes=2)))
        except Boom:
            failed.add(key)
        except (ValueError, ritz.errors.UnsupportedError):
            pass  # what this network does not have
        assert changes(before, state(model)) == [], key
    assert {row.key for row in ritz.measures.MEASURES.values() if row.cost in ("Hessian", "GGN", "search")} <= (
        failed | {"certificate", "stable_ranks"}
    )


def test_every_public_function_is_among_the_calls():
    functions = {name for name in ritz._HOME if name[0].islower()} - {
        "load",
        "stoppable",
        "study",
    }  # those see no model
    operators = {"Hessian", "GGN", "Fisher", "EmpiricalFisher", "GradientCovariance"}
    assert functions | operators <= set(CALLS)


def test_a_change_would_be_seen():
    model = studied()
    before = state(model)
    for disturb in (
        lambda: model[1].running_mean.add_(1),
        lambda: model[5].weight.grad.add_(1),
        lambda: model[3].eval(),
        lambda: model[0].bias.requires_grad_(False),
        lambda: model[2].register_forward_hook(lambda *args: None),
        lambda: setattr(model[1], "track_running_stats", False),
        lambda: torch.rand(1),
        lambda: np.random.rand(),  # noqa: NPY002
        lambda: random.random(),
    ):
        disturb()
        now = state(model)
        assert changes(before, now)
        before = now
