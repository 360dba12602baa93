"""Language models as a risk, curvature in Hugging Face's Trainer, and the optimisers of ritz under it."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ritz
from ritz.integrations import transformers as ours
from ritz.integrations.track import Tracker
from ritz.integrations.transformers import causal_lm, logits, next_tokens, shown
from ritz.loggers import Memory
from ritz.optim import KFAC, AutoDamping, Gadam, IterateAverage, LanczosOpt, TracePenalty

MEASURES = ["trace", "lambda_max"]
VOCABULARY = 7


class Output(dict):
    """What models of transformers give: a dictionary with attributes."""

    def __getattr__(self, name):
        return self[name]


class Bigrams(nn.Module):
    """A language model without attention: one matrix in, one out."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY)

    def forward(self, input_ids, attention_mask=None):
        return Output(logits=self.head(self.embed(input_ids).tanh()))


def batches():
    """Two of different size, some of whose tokens do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (7, 5), generator=generator)
    labels = tokens.clone()
    labels[2:, 3:], labels[0, :2] = -100, -100
    mask = torch.ones_like(tokens)
    whole = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    return [{name: x[:5] for name, x in whole.items()}, {name: x[5:] for name, x in whole.items()}]


def flat_loss(model, many):
    """The mean over all tokens that count, token by token."""
    rows = []
    for batch in many:
        out = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        for i, sequence in enumerate(batch["labels"]):
            rows += [-out[i, t - 1, label] for t, label in enumerate(sequence) if t and label != -100]
    return torch.stack(rows).mean()


def dense(loss, model):
    """The Hessian by two passes of autograd, row by row."""
    params = list(model.parameters())
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
    rows = [torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True) for g in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


# ------------------------------------------------------------------------------------------ models as a risk


def test_the_loss_is_a_mean_over_tokens_that_count_whatever_batch_they_are_in():
    model = Bigrams()
    risk = causal_lm(model, batches())
    assert risk.loss() == pytest.approx(flat_loss(model, batches()).item())
    assert risk.num_samples == 7
    with torch.no_grad():
        means = [flat_loss(model, [batch]).item() for batch in batches()]
    assert risk.loss() != pytest.approx(sum(means) / 2, rel=1e-4)  # batches do not weigh the same


def test_the_hessian_is_that_of_the_mean_over_tokens():
    model = Bigrams()
    found = ritz.Hessian(causal_lm(model, batches())).dense()
    torch.testing.assert_close(found, dense(flat_loss(model, batches()), model))


def test_outputs_are_known_so_there_are_exact_traces_and_margins():
    risk = causal_lm(Bigrams(), batches())
    exact = ritz.trace(ritz.GGN(risk), "exact")
    assert exact.value == pytest.approx(float(ritz.GGN(risk).dense().trace()))
    assert ritz.measure(risk, measures=["margin_median"])["margin_median"].value is not None


def test_a_batch_without_labels_is_its_own_and_padding_does_not_count():
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 1]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    given = {"input_ids": tokens, "labels": torch.tensor([[1, 2, 3, -100], [4, 5, 6, 1]])}
    model = Bigrams()
    masked = causal_lm(model, [{"input_ids": tokens, "attention_mask": mask}])
    assert masked.loss() == causal_lm(model, [given]).loss()
    assert next_tokens({"input_ids": tokens}).tolist() == tokens[:, 1:].tolist()
    with pytest.raises(ValueError, match="a batch of a language model must have labels or input_ids, got pixels"):
        next_tokens({"pixels": tokens})


def test_other_models_are_called_without_their_labels():
    class Classifier(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x))

    torch.manual_seed(0)
    model, X, y = Classifier(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), [{"x": X, "labels": y}], forward=logits)
    assert risk.loss() == pytest.approx(nn.functional.cross_entropy(model(X).logits, y).item())


def test_what_is_shown_to_kfac_is_what_the_loss_is_made_of():
    model, (batch, _) = Bigrams(), batches()
    seen = []
    loss = shown(SimpleNamespace(observe=lambda outputs, given: seen.append((outputs, given))))
    out = model(input_ids=batch["input_ids"])
    count = (batch["labels"][:, 1:] != -100).sum()
    assert loss(out, batch["labels"]).item() == pytest.approx(flat_loss(model, [batch]).item())
    assert loss(out, batch["labels"], num_items_in_batch=2 * count).item() == pytest.approx(
        flat_loss(model, [batch]).item() / 2
    )
    assert seen[0][0].shape == (5, 4, VOCABULARY)
    assert torch.equal(seen[0][1]["labels"], batch["labels"][:, 1:])
    with torch.no_grad():  # evaluation
        loss(out, batch["labels"])
    assert len(seen) == 2


# ----------------------------------------------------------------------------------- with a stand-in for it


def state_of(**fields):
    return SimpleNamespace(**{
        "is_world_process_zero": True, "global_step": 0, "epoch": 0.0, "log_history": [], **fields
    })  # fmt: skip


def make_risk(model):
    return causal_lm(model, batches())


def run(hooks, state, steps, per_epoch=2):
    hooks.on_train_begin(None, state, None, model=Bigrams())
    for step in steps:
        state.global_step, state.epoch = step, step / per_epoch
        hooks.on_step_end(None, state, None)
        if step % per_epoch == 0:
            hooks.on_epoch_end(None, state, None)
    hooks.on_train_end(None, state, None)


def test_rows_are_written_to_the_history():
    state, hooks = state_of(), ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    run(hooks, state, range(1, 6))
    assert [(row["step"], row["epoch"]) for row in state.log_history] == [(2, 1.0), (4, 2.0)]
    truth = float(dense(flat_loss(model := Bigrams(), batches()), model).trace())
    assert state.log_history[0]["curvature/hessian/trace"] == pytest.approx(truth)
    json.dumps(state.log_history, allow_nan=False)


def test_a_logger_takes_the_place_of_the_history():
    rows, state = [], state_of()
    hooks = ours.CurvatureHooks(
        make_risk, every=2, budget=1.0, measures=MEASURES, logger=lambda scalars, step: rows.append(step)
    )
    run(hooks, state, range(1, 5))
    assert (rows, state.log_history) == ([2, 4], [])


def test_epochs_count_where_that_is_asked_for():
    state, hooks = state_of(), ours.CurvatureHooks(make_risk, every_epochs=2, budget=1.0, measures=MEASURES)
    run(hooks, state, range(1, 9))
    assert [row["step"] for row in state.log_history] == [4, 8]


def test_an_epoch_that_is_cut_short_is_none():
    state, hooks = state_of(), ours.CurvatureHooks(make_risk, every_epochs=1, budget=1.0, measures=MEASURES)
    run(hooks, state, range(1, 6), per_epoch=2)
    hooks.on_epoch_end(None, state, None)  # as Trainer does at max_steps, 2.5 epochs
    assert [row["step"] for row in state.log_history] == [2, 4]


def test_another_model_gets_a_tracker_of_its_own():
    hooks = ours.CurvatureHooks(make_risk, every=1, budget=1.0, measures=MEASURES)
    run(hooks, state_of(), [1])
    first = hooks.tracker
    run(hooks, state_of(), [1])
    assert hooks.tracker is not first
    assert len(hooks.tracker.record.rows) == 1


def test_only_the_first_process_looks():
    hooks = ours.CurvatureHooks(make_risk, every=1, measures=MEASURES)
    run(hooks, state_of(is_world_process_zero=False), [1])
    assert hooks.tracker is None


def test_a_resumed_run_goes_on_from_the_history():
    state, first = state_of(), ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    run(first, state, [1, 2, 3])
    history = [{"loss": 2.0, "step": 1}, *json.loads(json.dumps(state.log_history))]
    again = ours.CurvatureHooks(make_risk, every=2, budget=1.0, measures=MEASURES)
    run(again, state_of(log_history=history, global_step=3), [4])
    assert [row["step"] for row in again.tracker.record.rows] == [2, 4]
    assert again.tracker.record.rows[0] == first.tracker.record.rows[0]
    assert again.tracker.spent == sum(row["track/seconds"] for row in again.tracker.record.rows)


def test_a_resumed_run_whose_rows_went_to_a_logger_looks_at_the_steps_of_the_straight_one():
    rows = Memory()
    hooks = ours.CurvatureHooks(make_risk, every=4, budget=1.0, measures=MEASURES, logger=rows)
    run(hooks, state_of(global_step=6), range(7, 13))
    assert [row["step"] for row in rows.rows] == [8, 12]


def test_a_missing_package_and_an_unknown_name_are_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(vars(ours), "EachStep", raising=False)
    with pytest.raises(ImportError, match="transformers is not installed here"):
        ours.EachStep  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Curvature'"):
        ours.Curvature  # noqa: B018


# -------------------------------------------------------------------------------------- with transformers


@pytest.fixture
def hf(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def norm_risk(model):
    """In the last normalisation alone, so that a look is quick."""
    return causal_lm(model, batches(), params="transformer.ln_f.*")


quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def gpt2(hf):
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=6, n_embd=4, n_layer=1, n_head=2, n_inner=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, initializer_range=0.3, loss_type="ForCausalLM",
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).double()


@quiet
def test_the_risk_of_a_gpt2_is_the_loss_of_transformers(hf):
    model, many = gpt2(hf).eval(), batches()
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in many]
    with torch.no_grad():
        totals = [float(model(**batch).loss) * count for batch, count in zip(many, counts, strict=True)]
    risk = causal_lm(model, many)
    assert risk.loss() == pytest.approx(sum(totals) / sum(counts), rel=1e-6)
    # a direction through two derivatives of their loss, kernels as they are for that
    H, v = ritz.Hessian(risk), torch.linspace(-1, 1, risk.dim)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = sum(model(**batch).loss * count for batch, count in zip(many, counts, strict=True)) / sum(counts)
        params = list(model.parameters())
        first = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
        second = torch.cat([g.flatten() for g in torch.autograd.grad(first @ v, params)])
    torch.testing.assert_close(H @ v, second, rtol=1e-5, atol=1e-8)


class Training:
    """A GPT-2 trained by all that ritz has for a loop."""

    def __init__(self, hf):
        self.model = gpt2(hf)
        loss = ritz.losses.CrossEntropy(class_dim=-1)
        self.optimizer = KFAC(self.model, lr=0.05, damping=0.1, loss=loss, factor_every=1, inverse_every=2)
        self.damping = AutoDamping(self.optimizer, causal_lm(self.model, batches()), every=2, num_batches=2)
        self.average = IterateAverage(self.model, start=1)
        self.penalty = TracePenalty(1e-3, class_dim=-1, forward=lambda model, x: logits(model, x)[:, :-1])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.tracker_settings = {"every": 2, "budget": 1.0, "measures": MEASURES}

    def loss(self, inputs, count=None):
        out = self.model(input_ids=inputs["input_ids"])
        return shown(self.optimizer)(out, inputs["labels"], count) + self.penalty(
            self.model, {"input_ids": inputs["input_ids"]}
        )

    def state(self):
        damping = self.optimizer.param_groups[0]["damping"]
        return [*self.model.state_dict().values(), *self.average.model.state_dict().values(), torch.tensor(damping)]


def arguments(hf, folder, **keywords):
    keywords = {"max_steps": 4, "save_strategy": "no", **keywords}
    return hf.TrainingArguments(
        str(folder), per_device_train_batch_size=3, report_to=[], disable_tqdm=True, logging_steps=2, use_cpu=True,
        max_grad_norm=0.0, seed=0, **keywords,
    )  # fmt: skip


def examples():
    return [
        {"input_ids": tokens, "labels": labels}
        for batch in batches()
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


@quiet
def test_training_under_trainer_is_that_of_a_plain_loop(hf, tmp_path):
    training, seen = Training(hf), []

    class Ours(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append({name: inputs[name] for name in ("input_ids", "labels")})
            return training.loss(inputs)

    watch = ours.CurvatureCallback(norm_risk, **training.tracker_settings)
    after = ours.EachStep(training.damping.step, training.average.step)
    trainer = Ours(
        training.model, arguments(hf, tmp_path), train_dataset=examples(), callbacks=[watch, after],
        optimizers=(training.optimizer, training.scheduler),
    )  # fmt: skip
    trainer.train()
    expected = Training(hf)
    tracker = Tracker(norm_risk(expected.model), **expected.tracker_settings)
    expected.model.train()
    for batch in seen:
        expected.loss(batch).backward()
        expected.optimizer.step()
        expected.damping.step()  # Trainer: the callbacks come after the schedule, which damping does not read
        expected.scheduler.step()
        expected.average.step()
        expected.optimizer.zero_grad()
        tracker.step()
    assert len(seen) == 4
    for here, there in zip(training.state(), expected.state(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    for name in ("curvature/hessian/trace", "curvature/hessian/lambda_max"):
        assert watch.tracker.record.column(name)[0] == [2, 4]
        assert watch.tracker.record.column(name)[1] == pytest.approx(tracker.record.column(name)[1], rel=1e-9)
    assert [row["step"] for row in trainer.state.log_history if "track/share" in row] == [2, 4]


@quiet
def test_kfac_needs_no_trainer_of_its_own_and_a_resumed_run_has_the_whole_record(hf, tmp_path):
    def fit(steps, **how):
        model = gpt2(hf)
        loss = ritz.losses.CrossEntropy(class_dim=-1)
        optimizer = KFAC(model, lr=0.05, damping=0.1, loss=loss, factor_every=1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        watch = ours.CurvatureCallback(norm_risk, every=2, budget=1.0, measures=MEASURES)
        trainer = hf.Trainer(
            model, arguments(hf, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2),
            train_dataset=examples(), optimizers=(optimizer, schedule), compute_loss_func=shown(optimizer),
            callbacks=[watch],
        )  # fmt: skip
        trainer.train(**how)
        return watch.tracker

    whole = fit(4)
    again = fit(4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    name = "curvature/hessian/trace"
    assert again.record.column(name)[0] == whole.record.column(name)[0] == [2, 4]
    assert again.record.column(name)[1] == pytest.approx(whole.record.column(name)[1], rel=1e-6)


@quiet
def test_rows_can_go_wherever_the_trainer_reports_to(hf, tmp_path):
    logged = []

    class Reporter(hf.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(dict(logs))

    trainer = hf.Trainer(
        gpt2(hf), arguments(hf, tmp_path, max_steps=2), train_dataset=examples(), callbacks=[Reporter()]
    )
    log = lambda scalars, step: trainer.log(scalars)  # noqa: E731
    trainer.add_callback(ours.CurvatureCallback(norm_risk, every=2, budget=1.0, measures=MEASURES, logger=log))
    trainer.train()
    assert len([row for row in logged if "curvature/hessian/trace" in row]) == 1
    assert len([row for row in trainer.state.log_history if "track/share" in row]) == 1


# ------------------------------------------------------------------------- every optimiser, accumulated batches


def kfac(model):
    loss = ritz.losses.CrossEntropy(class_dim=-1)
    optimizer = KFAC(model, lr=0.05, damping=0.1, loss=loss, factor_every=1, inverse_every=2)
    damping = AutoDamping(optimizer, causal_lm(model, batches()), every=2, num_batches=2)
    return optimizer, shown(optimizer), [damping.step]


def gadam(model):
    return Gadam(model.parameters(), lr=0.01, start=0, model=model), None, []


def lanczos(model):
    return LanczosOpt(model.parameters(), causal_lm(model, batches()), lr=0.05, damping=0.5, k=3), None, []


@quiet
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [kfac, gadam, lanczos], ids=lambda make: make.__name__)
def test_an_optimiser_goes_in_as_it_is_and_does_what_it_does_in_a_loop(hf, tmp_path, make, accumulate):
    """Trainer divides by the tokens of all batches of a step, as it counts them; so does the loop."""
    model = gpt2(hf)
    optimizer, loss, after = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    given = []

    class Watched(hf.Trainer):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **keywords):
            given.append((inputs["input_ids"].clone(), inputs["labels"].clone(), num_items_in_batch))
            return super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **keywords)

    settings = arguments(hf, tmp_path, max_steps=2, gradient_accumulation_steps=accumulate)
    Watched(
        model, settings, train_dataset=examples()[:6], optimizers=(optimizer, schedule), compute_loss_func=loss,
        callbacks=[ours.EachStep(*after)],
    ).train()  # fmt: skip
    assert len(given) == 2 * accumulate

    again = gpt2(hf).train()
    optimizer, loss, after = make(again)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loss = loss or shown(SimpleNamespace(observe=lambda *_: None))
    for step in range(2):
        for tokens, labels, count in given[step * accumulate : (step + 1) * accumulate]:
            loss(again(input_ids=tokens), labels, count).backward()
        optimizer.step()
        schedule.step()
        for call in after:
            call()
        optimizer.zero_grad()
    for here, there in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-8)
