"""`ritz doctor` and `ritz.doctor.examine`: what is found and advised, and how well time and memory are projected."""

import json
import time

import pytest
import torch
from torch import Tensor, nn

import ritz
from ritz.cli import main, screen
from ritz.doctor import Checkup, costs, examination, examine
from ritz.doctor.checkup import Trial
from ritz.doctor.costs import LiveBytes, Products
from ritz.doctor.examination import _Examination
from ritz.estimators.precision import coarse_products
from ritz.runs import Run


def risk_of(model: nn.Module, num: int = 24, features: int = 5, classes: int = 3, **options) -> ritz.Risk:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num, features, generator=generator)
    y = torch.randint(0, classes, (num,), generator=generator)
    return ritz.Risk(model, nn.CrossEntropyLoss(), (X, y), **options)


def mlp(*middle: nn.Module, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), *middle, nn.Linear(width, 3))


class Noisy(nn.Module):
    """A forward pass that is random."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Skewed(torch.autograd.Function):
    """x^2 with a gradient that is that of no function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (2 * x + x.roll(1, -1).square())


class Broken(nn.Module):
    """Through a function whose gradient is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return Skewed.apply(x)


class Once(torch.autograd.Function):
    """A square that can be differentiated once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Rough(nn.Module):
    """Through a function without a second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


# ---------------------------------------------------------------------------------------------- the examination


def test_a_sound_network_is_found_sound():
    found = examine(risk_of(mlp(nn.Tanh())))
    assert found.healthy
    for name in ("finite", "deterministic", "second derivatives", "symmetric", "linear", "memory"):
        assert found[name].status == "ok"
    assert [trial.route for trial in found.trials] == ["forward", "reverse", "difference"]
    assert sum(trial.chosen for trial in found.trials) == 1
    assert all(trial.asymmetry < 1e-10 for trial in found.trials if trial.route != "difference")
    assert {projection.command for projection in found.projections} == {"spectrum", "measure", "measure --audit"}


def test_a_random_forward_pass_is_found():
    found = examine(risk_of(mlp(Noisy())))
    assert not found.healthy
    assert found["deterministic"].status == "failed"
    assert "the forward pass is random" in found["deterministic"].text
    assert not found.projections


def test_weights_that_are_not_finite_are_found():
    model = mlp(nn.Tanh())
    with torch.no_grad():
        model[0].bias[2] = torch.nan
    found = examine(risk_of(model))
    assert found["finite"].status == "failed"
    assert found.advice() == ["finite: load weights and data that are finite"]


def test_a_gradient_of_no_function_is_not_symmetric():
    found = examine(risk_of(mlp(Broken())))
    assert found["symmetric"].status == "failed"
    assert "is not of any function" in found["symmetric"].remedy
    assert not found.healthy


def test_an_operation_without_a_second_derivative_is_named():
    found = examine(risk_of(mlp(Rough())))
    assert found["second derivatives"].status == "warning"
    assert "Once" in found["second derivatives"].text
    assert next(trial for trial in found.trials if trial.chosen).route == "difference"
    assert found.healthy


def test_statistics_that_were_never_learned_are_found():
    model = mlp(nn.BatchNorm1d(8))
    found = examine(risk_of(model))
    assert found["BatchNorm"].status == "warning"
    assert found.verdict == "sound, with 1 warning: see what is to do"  # "no problem" would not be true
    assert found.healthy
    model.train()(torch.randn(16, 5, generator=torch.Generator().manual_seed(1)))
    assert examine(risk_of(model))["BatchNorm"].status == "ok"
    assert "statistics of each batch" in examine(risk_of(model, mode="train"))["BatchNorm"].text


def test_dropout_attention_frozen_and_unused_weights_are_noted():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.drop, self.out = nn.Linear(5, 12), nn.Dropout(0.5), nn.Linear(4, 3)
            self.unused = nn.Linear(2, 2)
            self.mix.bias.requires_grad_(False)

        def forward(self, x):
            q, k, v = self.mix(x[:, None]).chunk(3, dim=-1)
            return self.out(self.drop(nn.functional.scaled_dot_product_attention(q, k, v))[:, 0])

    found = examine(risk_of(Net()))
    assert "1 layer, switched off inside products" in found["dropout"].text
    assert "attention by the math kernel" in found["attention"].text
    assert found["frozen"].text.startswith("12 parameters")
    assert "unused.weight" in found["gradient"].text
    assert found.healthy


@pytest.mark.parametrize(("forward", "said"), [(0.1, ["route"]), (0.15, [])])
def test_an_exact_route_that_is_much_faster_than_the_one_taken_is_noted(forward, said):
    looked = _Examination(risk_of(mlp()), "standard", 10, 2, 0, lambda text, part: None)
    looked.trials = Trial("forward", forward), Trial("reverse", 0.2, chosen=True), Trial("difference", 0.01)
    looked._faster_route()
    assert [finding.name for finding in looked.findings] == said
    if said:
        assert looked.findings[0].text == "the forward route is 2.0 times as fast as the one taken"
        assert "ritz.Plan(route='forward')" in looked.findings[0].remedy


def test_the_exact_trace_of_a_piecewise_linear_network_is_noted():
    assert examine(risk_of(mlp(nn.ReLU())))["kinks"].status == "note"
    with pytest.raises(KeyError, match="kinks was not examined; these were: finite"):
        examine(risk_of(mlp(nn.Tanh())))["kinks"]


def test_a_loss_without_a_gradient_is_found():
    class Stepped(nn.Module):
        def forward(self, x):
            raise_on_gradient = torch.is_grad_enabled() and x.requires_grad
            if raise_on_gradient:
                raise RuntimeError("no gradient through here")
            return x

    found = examine(risk_of(mlp(Stepped())))
    assert "RuntimeError: no gradient through here" in found["gradient"].text
    assert not found.healthy


def test_small_batches_and_missing_memory_are_advised_on(monkeypatch):
    monkeypatch.setattr(examination, "free_memory", lambda device: 1000.0)
    found = examine(risk_of(mlp(nn.Tanh()), num=40, batch_size=4))
    assert "batches of 4 samples" in found["batches"].text
    assert found["memory"].status == "warning"
    assert found.advice()[0].startswith("memory: plan=ritz.Plan(chunk=1")


def test_precision_that_is_too_low_is_told(monkeypatch):
    # without oneDNN: on some processors its bfloat16 fails, and then all of it does for the rest of the process
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert examine(risk_of(mlp(nn.Tanh()), dtype=torch.bfloat16))["precision"].remedy == "dtype=torch.float32"
    risk = risk_of(nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten()), dtype=torch.float32)
    assert coarse_products(risk) == ""
    risk.device = torch.device("cuda")  # as torch is set by default there
    assert coarse_products(risk) == "convolutions"


def test_products_that_single_precision_has_no_digits_for_are_told():
    model = mlp(nn.Tanh())
    with torch.no_grad():
        for p in model[-1].parameters():
            p.mul_(40.0)
    X = risk_of(model, num=200).batches.first().data[0]
    best, second = model(X).topk(2).values.T
    X = X[best - second > 15]  # a loss of 3e-7 at most
    fitted = ritz.Risk(model, nn.CrossEntropyLoss(), (X, model(X).argmax(1)))
    found = examine(fitted.to(dtype=torch.float32))["digits"]
    assert found.status == "warning"
    assert "products in float32 are off by" in found.text
    assert found.remedy == "use dtype=torch.float64"
    assert examine(risk_of(mlp(nn.Tanh()), dtype=torch.float32))["digits"].status == "ok"
    assert not any(each.name == "digits" for each in examine(fitted).findings)  # in float64


def test_an_examination_leaves_the_network_as_it_was():
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    examine(risk_of(model))
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_num_threads() == threads


def test_a_checkup_is_the_same_after_it_was_plain():
    found = examine(risk_of(mlp(nn.ReLU())))
    assert Checkup.of(json.loads(json.dumps(found.plain()))) == found


@pytest.mark.parametrize("middle", [nn.ReLU(), Rough(), Noisy()])
def test_a_checkup_is_the_same_after_it_was_saved(middle, tmp_path):
    found = examine(risk_of(mlp(middle)))
    loaded = ritz.load(found.save(tmp_path / "checkup"))
    assert isinstance(loaded, Checkup)
    assert loaded == found
    assert str(loaded) == str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"measures": "nothing"}, "no measure is named"), ({"num_steps": 0}, "num_steps and num_probes must be at least")],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        examine(risk_of(mlp(nn.Tanh())), **options)
    with pytest.raises(TypeError, match=r"expected a ritz.Risk, got Sequential"):
        examine(mlp(nn.Tanh()))


# -------------------------------------------------------------------------------------------------- projections


def test_time_and_memory_are_projected_to_a_factor_of_two(monkeypatch):
    """On a network whose products and vectors both count; by the time of the process, as the machine may be busy."""
    monkeypatch.setattr(costs, "clock", time.process_time)
    model = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 80), nn.ReLU(), nn.Linear(80, 3))
    risk = risk_of(model, num=60, batch_size=20)
    found = examine(risk, num_steps=8, num_probes=8)
    operator = ritz.Hessian(risk)
    operator @ torch.ones(operator.dim)  # the route is chosen, and not counted
    begin = time.process_time()
    ritz.spectrum(operator, num_steps=8, num_probes=8)
    took = time.process_time() - begin
    with LiveBytes() as live:
        ritz.spectrum(operator, num_steps=2, num_probes=8)
    projected = found.projections[0]
    assert took / 2 < projected.seconds < 2 * took
    assert live.peak / 2 < projected.memory < 2 * live.peak


def test_an_audit_is_projected_to_a_factor_of_two(monkeypatch):
    monkeypatch.setattr(costs, "clock", time.process_time)
    model = nn.Sequential(nn.Linear(5, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU(), nn.Linear(60, 3))
    risk, sized = risk_of(model, num=60, batch_size=20), {"num_steps": 30, "num_probes": 4}
    keys = ["trace", "lambda_max", "train_loss"]
    projected = examine(risk, measures=keys, **sized).projections
    begin = time.process_time()
    ritz.audit(risk, measures=keys, **sized)
    took = time.process_time() - begin
    measure, audit = projected[1:]
    assert (measure.command, audit.command) == ("measure", "measure --audit")
    assert "4 moves: rescale, permute, scale_output, scale_layers" in audit.how
    assert took / 2 < audit.seconds < 2 * took
    assert measure.seconds < audit.seconds


def test_an_audit_that_cannot_be_made_is_not_projected():
    found = examine(risk_of(nn.Sequential(nn.Linear(5, 3), nn.Softmax(1))))
    assert [projection.command for projection in found.projections] == ["spectrum", "measure"]


def test_products_are_scaled_by_vectors_and_samples():
    timed = Products(one=1.0, full=2.4, chunk=8, scale=3.0)
    assert timed.seconds(1) == pytest.approx(3.0)
    assert timed.seconds(8) == pytest.approx(3 * 2.4)
    assert timed.seconds(11) == pytest.approx(3 * (2.4 + 1.4))


def test_more_measures_take_longer_by_what_they_need():
    risk = risk_of(mlp(nn.Tanh(), width=20))
    forward, standard, every = (examine(risk, measures=m).projections[1] for m in ("train_loss", "standard", "all"))
    assert forward.seconds < standard.seconds < every.seconds
    assert forward.memory < standard.memory
    assert f"{len(ritz.measures.MEASURES)} measures" in every.how


def test_what_is_alive_is_counted_once_and_views_are_free():
    with LiveBytes() as live:
        a = torch.ones(1000)
        b = a.view(10, 100)[2:]
        c = b * 2
    assert live.peak == 8 * (1000 + 800)
    del c


# -------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_findings_costs_and_a_verdict(study, capsys):
    assert main(["doctor", "study.py:make_risk", "--weights", "a.safetensors", "--out", "run"]) == 0
    text = capsys.readouterr().out
    for words in (
        "deterministic",
        "symmetric",
        "reverse route",
        "ritz spectrum",
        "ritz measure",
        "no problem found",
    ):
        assert words in text
    run = Run.open("run")
    assert Checkup.of(run.results["checkup"]).healthy
    assert run.header["subject"]["num_params"] == 131


def test_ctrl_c_leaves_what_was_found_and_the_examination_begins_anew(study, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    words = ["doctor", "study.py:make_risk", "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(costs, "time_products", stop)
        assert main(words) == screen.INTERRUPTED
    assert "what is known is in run; the same command with --out run goes on" in capsys.readouterr().err
    kept = Run.open("run")
    assert kept.state == "interrupted"
    found = Checkup.of(kept.results["checkup"])
    assert found["symmetric"].status == "ok"
    assert found.projections == ()
    assert main(words) == 0
    assert Checkup.of(Run.open("run").results["checkup"]).projections


def test_what_is_not_sound_has_status_1_and_says_what_to_do(study, capsys):
    assert main(["doctor", "study.py:diverged", "--json", "--out", "run"]) == screen.FAILED
    tree = json.loads(capsys.readouterr().out)
    assert tree["result"]["healthy"] is False
    assert tree["result"]["findings"][0]["remedy"] == "load weights and data that are finite"
    assert main(["doctor", "study.py:misfit"]) == screen.FAILED
    text = " ".join(capsys.readouterr().out.split())
    assert "to do: loss: make the model run on the data first" in text
    assert "not sound" in text


def test_doctor_refuses_what_it_cannot_read(study, capsys):
    assert main(["doctor", "study.py:nothing"]) == 2
    assert main(["doctor", "study.py:make_risk", "--num-steps", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("ritz doctor: ") for line in lines)
    assert not (study / "ritz-runs").exists()


def test_an_error_that_says_what_to_do_needs_no_remedy():
    batches = [{"x": torch.zeros(3, 5), "y": torch.zeros(3)}]
    for risk in (
        ritz.Risk(mlp(), nn.CrossEntropyLoss(), batches),
        ritz.Risk(mlp(), data=[torch.zeros(3, 5)], batch_loss=lambda model, X: model(X).mean()),
        risk_of(mlp(Noisy())),
    ):
        found = examine(risk)
        assert not found.healthy
        assert found.advice() == []
        assert found.table().title == f"Sequential, {risk.dim} parameters"  # no more is known, and nothing follows it
    assert examine(risk_of(nn.Linear(7, 3))).advice() == ["loss: make the model run on the data first"]


def test_a_checkup_is_one_line_in_a_notebook():
    assert repr(examine(risk_of(mlp(Noisy())))).startswith("Checkup(Sequential, 75 parameters; not sound: ")
    assert repr(examine(risk_of(mlp(nn.Tanh())))).endswith("sound: no problem found)")


def test_one_measure_and_one_move_are_counted_as_one():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    regression = ritz.Risk(model, nn.MSELoss(), (torch.ones(24, 5), torch.ones(24, 1)))
    spectrum, measure, audit = examine(regression, measures=["weight_norm"]).projections
    assert "scaled to 29 products, 1 such batch, and the work on vectors" in spectrum.how
    assert measure.how.startswith("1 measure: ")
    assert audit.how == "the same, and once more with 25 steps for 1 move: permute"
