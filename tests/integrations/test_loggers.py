"""Adapters: every package gets the rows in its own way, and none is imported before it is used."""

import os
import subprocess
import sys
import types

import pytest

from ritz.integrations.loggers import MLflow, TensorBoard, Trackio, WeightsAndBiases
from ritz.loggers import Fanout, Logger, as_logger

ROW = {"curvature/hessian/trace": 2.0, "curvature/hessian/trace/stderr": 0.1}


class Host:
    """A package, or a run of it, that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


class Run:
    def __init__(self):
        self.rows, self.axes, self.ended = [], [], False

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, row, step=None):
        self.rows.append((row, step))

    def finish(self):
        self.ended = True


def package(monkeypatch, name, run=None):
    """A stand-in for a package whose init gives a run."""
    made = types.ModuleType(name)
    made.run, made.settings = run, []

    def init(**settings):
        made.settings.append(settings)
        return Run()

    made.init = init
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_every_adapter_is_a_logger():
    adapters = [TensorBoard(Host()), WeightsAndBiases(Run()), Trackio(Run()), MLflow(module=Host())]
    assert all(isinstance(adapter, Logger) and as_logger(adapter) is adapter for adapter in adapters)
    Fanout(*adapters).log(ROW, 10)


def test_no_package_is_loaded_by_the_adapters_and_callbacks_themselves():
    names = ("lightning", "pytorch_lightning", "transformers", "tensorboard", "wandb", "mlflow", "trackio")
    code = (
        "import sys, ritz.integrations.track, ritz.integrations.loggers, ritz.integrations.lightning\n"
        f"import ritz.integrations.transformers\nprint([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_tensorboard_gets_one_number_at_a_time_and_they_are_flushed():
    writer = Host()
    TensorBoard(writer).log(ROW, 10)
    assert writer.calls == [("add_scalar", (*item, 10), {}) for item in ROW.items()] + [("flush", (), {})]


def test_tensorboard_refuses_what_is_neither_folder_nor_writer():
    with pytest.raises(TypeError, match="target must be a folder or a SummaryWriter, got int"):
        TensorBoard(3)


def test_tensorboard_reads_back_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "runs")
    board.log(ROW, 10)
    board.log({"curvature/hessian/trace": 3.0}, 20)
    board.close()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("curvature/hessian/trace")] == [(10, 2.0), (20, 3.0)]
    assert [e.value for e in events.Scalars("curvature/hessian/trace/stderr")] == pytest.approx([0.1])


def test_weights_and_biases_gets_rows_over_an_axis_of_their_own():
    run = Run()
    logger = WeightsAndBiases(run)
    logger.log(ROW, 10)
    logger.log(ROW, 5)  # behind the last step: as a plain log(row, step=5) it would be dropped
    assert run.rows == [({**ROW, "ritz/step": 10}, None), ({**ROW, "ritz/step": 5}, None)]
    assert run.axes == [(name, "ritz/step") for name in ROW]  # said once
    logger.close()
    assert run.ended


def test_weights_and_biases_takes_the_open_run_or_opens_one(monkeypatch):
    current = Run()
    wandb = package(monkeypatch, "wandb", current)
    assert WeightsAndBiases().run is current
    assert WeightsAndBiases(project="mine").run is not current
    wandb.run = None
    assert isinstance(WeightsAndBiases().run, Run)
    assert wandb.settings == [{"project": "mine"}, {}]


def test_trackio_gets_rows_at_their_steps(monkeypatch):
    trackio = package(monkeypatch, "trackio")
    logger = Trackio(project="mine")
    logger.log(ROW, 10)
    assert logger.run.rows == [(ROW, 10)]
    assert trackio.settings == [{"project": "mine"}]
    logger.close()
    assert logger.run.ended


def test_the_file_run_of_trackio_is_not_taken_for_an_open_run(monkeypatch):
    trackio = package(monkeypatch, "trackio", types.ModuleType("trackio.run"))
    assert isinstance(Trackio().run, Run)
    assert trackio.settings == [{}]


def test_mlflow_gets_rows_for_the_active_run_or_a_named_one(monkeypatch):
    host = Host()
    monkeypatch.setitem(sys.modules, "mlflow", host)
    MLflow().log(ROW, 10)
    MLflow("abc").log(ROW, 20)
    MLflow().close()
    assert host.calls == [
        ("log_metrics", (ROW,), {"step": 10, "run_id": None}),
        ("log_metrics", (ROW,), {"step": 20, "run_id": "abc"}),
        ("end_run", (), {}),
    ]


@pytest.mark.parametrize(
    ("adapter", "module", "message"),
    [
        (lambda: TensorBoard("folder"), "torch.utils.tensorboard", "TensorBoard is not installed here: pip install"),
        (WeightsAndBiases, "wandb", "Weights & Biases is not installed here: pip install wandb"),
        (Trackio, "trackio", "Trackio is not installed here: pip install trackio"),
        (MLflow, "mlflow", "MLflow is not installed here: pip install mlflow"),
    ],
)
def test_a_package_that_is_not_there_is_named(adapter, module, message, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        adapter()


# ------------------------------------------------------------------------------ the packages themselves, where there

PROGRAMS = {
    "wandb": """
from ritz.integrations.loggers import WeightsAndBiases
logger = WeightsAndBiases(project="x", mode="offline", dir=FOLDER)
logger.log({"loss": 2.0}, 10)
logger.log({"loss": 1.0}, 5)  # behind the last step
print("RESULT", logger.run.summary["loss"], logger.run.summary["ritz/step"])
logger.close()
""",
    "mlflow": """
import mlflow
from ritz.integrations.loggers import MLflow
mlflow.set_tracking_uri(f"file://{FOLDER}/store")
with mlflow.start_run() as run:
    logger = MLflow()
    logger.log({"loss": 2.0}, 10)
    logger.log({"loss": 1.0}, 20)
last = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")[-1]
print("RESULT", last.value, last.step)
""",
    "trackio": """
import sqlite3
from pathlib import Path
from ritz.integrations.loggers import Trackio
logger = Trackio(project="x")
logger.log({"loss": 1.0}, 20)
logger.close()
(base,) = Path(FOLDER).glob("*.db")
((step, row),) = sqlite3.connect(base).execute("select step, metrics from metrics").fetchall()
print("RESULT", __import__("json").loads(row)["loss"], step)
""",
}


@pytest.mark.parametrize(("package", "expected"), [("wandb", "1 5"), ("mlflow", "1.0 20"), ("trackio", "1.0 20")])
def test_the_package_itself_has_the_rows(package, expected, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    apart = {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "TRACKIO_DIR": str(tmp_path)}
    program = f"FOLDER = {str(tmp_path)!r}\n{PROGRAMS[package]}"  # in a process of its own: they start threads
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ, **apart},
        cwd=tmp_path,
    )  # fmt: skip
    assert f"RESULT {expected}" in done.stdout, done.stderr
