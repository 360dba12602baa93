"""The benchmark of speed: what it chooses, keeps when a tool fails or is killed, prepares and prints; no seconds."""

import argparse
import importlib
import json
import math
import time
from pathlib import Path

import pytest
import torch

import ritz
from ritz import compilation

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("single")


@pytest.fixture(scope="module")
def speed(script):
    return script("speed")


@pytest.fixture
def part(speed):
    """A module of the benchmark, by name."""
    return lambda name: importlib.import_module(f"peers.{name}")


@pytest.fixture
def lowered(monkeypatch):
    """What is compiled; here a graph is run as it was traced."""
    made: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compilation, "lowered", lambda graph: made.append(graph) or graph)
    return made


@pytest.fixture
def ask(speed, tmp_path):
    """The settings of a call, as the command line gives them."""

    def of(suite: str, *options: str) -> argparse.Namespace:
        args = speed.arguments().parse_args([suite, *options, "--out", str(tmp_path)])
        args.quick = True
        return speed.settled(args)

    return of


def written(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf8"))


# ------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        (None, [("a", "GGN", 1), ("a", "Hessian", 8), ("b", "GGN", 8)]),
        (["a"], [("a", "GGN", 1), ("a", "Hessian", 8)]),
        (["*/GGN"], [("a", "GGN", 1), ("b", "GGN", 8)]),
        (["a/Hessian/8", "b"], [("a", "Hessian", 8), ("b", "GGN", 8)]),
        (["a/*/1"], [("a", "GGN", 1)]),
    ],
)
def test_a_case_is_chosen_by_network_matrix_and_columns(part, only, chosen):
    every = [("a", "GGN", 1), ("a", "Hessian", 8), ("b", "GGN", 8)]
    assert [case for case in every if part("rows").is_chosen(only, *case)] == chosen


def test_the_networks_of_only_are_those_that_are_made(ask, part):
    args = ask("products", "--only", "tiny_resnet/Hessian/8", "tiny/GGN")
    assert set(args.problems) == {"tiny", "tiny_resnet"}
    assert set(part("products").cases(args)) == {
        ("tiny", "float32", "GGN", 1), ("tiny", "float32", "GGN", 8), ("tiny_resnet", "float32", "Hessian", 8)
    }  # fmt: skip


@pytest.mark.parametrize(("name", "dim"), [("wide_resnet28_10", 36_546_980), ("gpt2_small", 124_439_808)])
def test_networks_have_their_published_size(part, name, dim):
    if name == "gpt2_small":
        pytest.importorskip("transformers")
    with torch.device("meta"):
        model = part("problems").KINDS[name].build()
    assert sum(p.numel() for p in model.parameters()) == dim


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_gpt2"])
def test_ritz_agrees_with_float64_on_small_networks_of_the_kinds_that_are_timed(speed, ask, name):
    if name == "tiny_gpt2":
        pytest.importorskip("transformers")
    args = ask("products", "--only", f"{name}/Hessian/2", "--columns", "2", "--tools", "ritz", "--batch-size", "2")
    rows = written(speed.run(args))["rows"]
    ours = [row for row in rows if row["tool"] == "ritz"]
    assert [row["matrix"] for row in ours] == ["Hessian"]
    assert all(row["error"] < 1e-5 for row in ours)


# ---------------------------------------------------------------------------------------- what goes wrong


def test_a_tool_that_takes_too_long_is_told_of_and_the_others_are_timed(part):
    clock = part("clock").Clock("cpu", rounds=3, patience=0.05)
    found = clock.turns({"slow": lambda: time.sleep(5), "quick": lambda: None})
    assert (found["slow"]["failed"], found["slow"]["seconds"]) == ("out of time after 0.05 s", [])
    assert (found["quick"]["failed"], len(found["quick"]["seconds"])) == ("", 3)


def test_what_is_given_up_cannot_be_caught_as_an_error(part):
    def stubborn() -> None:
        for _ in range(2):
            try:
                time.sleep(5)
            except Exception:
                pytest.fail("caught")

    assert part("clock").Clock("cpu", patience=0.05).turns({"stubborn": stubborn})["stubborn"]["failed"]


def test_memory_that_does_not_suffice_is_told_of(part):
    def wide() -> None:
        raise torch.OutOfMemoryError("tried to allocate 200 GiB\nand more")

    found = part("clock").Clock("cpu").turns({"wide": wide})
    assert found["wide"]["failed"] == "OutOfMemoryError: tried to allocate 200 GiB"


def test_a_network_that_cannot_be_made_is_a_line_and_the_next_one_is_timed(speed, part, ask, monkeypatch):
    plain = part("products").make
    monkeypatch.setattr(
        part("products"), "make", lambda name, *a, **k: 1 / 0 if name == "conv" else plain(name, *a, **k)
    )
    args = ask("products", "--problems", "conv", "tiny", "--columns", "1", "--matrices", "GGN", "--tools", "ritz")
    report = written(speed.run(args))
    assert [(r["case"], r["tool"], r["failed"]) for r in report["rows"][:2]] == [
        ("conv", "", "ZeroDivisionError: division by zero"), ("tiny", "ritz", "")
    ]  # fmt: skip
    assert report["rows"][1]["seconds"] > 0


def test_cases_for_which_no_time_is_left_are_told_of(speed, ask):
    args = ask("products", "--problems", "tiny", "--columns", "1", "--budget", "0")
    assert [row["failed"] for row in written(speed.run(args))["rows"]] == ["not begun: out of time"]


def test_timed_rows_are_kept_where_the_check_in_float64_fails(speed, part, ask, monkeypatch):
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("float64")

    monkeypatch.setattr(part("tools"), "truth", fails)
    args = ask("products", "--problems", "tiny", "--columns", "1", "--matrices", "GGN", "--tools", "ritz")
    rows = written(speed.run(args))["rows"]
    assert rows[0]["tool"] == "ritz"
    assert rows[0]["seconds"] > 0
    assert "error" not in rows[0]
    assert rows[-1]["failed"] == "OutOfMemoryError: float64"


def test_what_was_told_before_a_kill_is_on_file(speed, part, ask, monkeypatch, tmp_path):
    class Killed:
        def __call__(self, V: torch.Tensor) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(part("tools"), "peer_arms", lambda *_: {"curvlinops": Killed()})
    args = ask("products", "--problems", "tiny", "--columns", "1", "--matrices", "GGN", "--tools", "ritz", "curv*")
    with pytest.raises(KeyboardInterrupt):
        speed.run(args)
    (row,) = written(tmp_path / "speed_products_cpu.json")["rows"]
    assert row["tool"] == "ritz"
    assert row["first"] > 0


def test_on_a_gpu_a_call_that_had_to_ask_for_memory_is_taken_again(part, monkeypatch):
    """By the functions of a stand-in for a GPU."""
    asked, calls = iter([0, 7, 7, 7, 7, 7]), []
    stats = {"memory_stats": lambda: {"num_device_alloc": next(asked)}, "max_memory_allocated": lambda: 5}
    nothing = dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    for name, fn in {**stats, **nothing, "max_memory_reserved": lambda: 6}.items():
        monkeypatch.setattr(torch.cuda, name, fn)
    found = part("clock").Clock("cuda", rounds=3).turns({"tool": lambda: calls.append(1)})["tool"]
    assert (found["peak"], found["reserved"], len(found["seconds"])) == (5, 6, 3)
    assert len(calls) == 4 + 3 + 1  # first calls, rounds, and one of these twice


# --------------------------------------------------------------------------------------------- compiling


def test_compiled_products_are_a_tool_beside_the_usual_ones(speed, ask, lowered):
    args = ask("products", "--problems", "tiny", "--columns", "1", "--matrices", "Hessian", "--tools", "ritz*")
    args.compile = True
    gradient = importlib.import_module("peers.tools").gradient_arms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peers.tools.gradient_arms", lambda problem, compiled: gradient(problem, False))
        rows = {row["tool"]: row for row in written(speed.run(args))["rows"]}
    assert list(rows)[:3] == ["ritz", "ritz, compiled", "ritz, nothing kept"]
    assert (rows["ritz"]["way"]["compiled"], rows["ritz, compiled"]["way"]["compiled"]) == (0, 1)
    assert any("compiled in" in said for said in rows["ritz, compiled"]["said"])


def test_products_that_were_to_be_compiled_and_were_not_are_said_to_be(part, ask, monkeypatch):
    def fails(graph: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compilation, "lowered", fails)
    args = ask("products", "--problems", "tiny", "--columns", "1", "--tools", "ritz, compiled", "--compile")
    args.left, args.prepared, args.keep = (lambda: math.inf), None, lambda *_, **__: None
    rows: list[dict] = []
    problem = part("problems").make("tiny", "cpu")
    part("products")._Measured(args, problem, {}, "float32", "GGN", 1).add_to(rows)
    assert rows[0]["failed"] == "not compiled, taken as it is"
    assert "no compiler" in rows[0]["said"][0]


def test_each_case_and_each_gradient_is_compiled_ahead_once_wide_products_first(part, ask):
    args = ask("products", "--problems", "tiny", "tiny_resnet", "--compile")
    jobs = part("prepare").jobs_of(args, part("products").cases(args))
    assert [(job["tool"], job.get("matrix"), job.get("k")) for job in jobs if job["problem"] == "tiny"] == [
        ("ritz, compiled", "Hessian", 8), ("ritz, compiled", "GGN", 8), ("ritz, compiled", "Hessian", 1),
        ("ritz, compiled", "GGN", 1), ("gradient, compiled", None, None),
    ]  # fmt: skip
    assert len(jobs) == 10


def test_each_suite_compiles_ahead_what_it_will_multiply_with(speed, ask, monkeypatch):
    asked: list[dict] = []
    monkeypatch.setattr(speed, "prepare", lambda jobs, *_: asked.extend(jobs))
    args = ask("products", "--only", "tiny/GGN/1", "--compile", "--prepare", "2")
    args.left = lambda: math.inf
    speed._prepared(args)
    assert [(job.get("matrix"), job.get("k")) for job in asked] == [("GGN", 1), (None, None)]
    asked.clear()
    args.suite = "spectrum"
    speed._prepared(args)
    assert [(job["matrix"], job["k"], job["plan"]) for job in asked] == [("Hessian", 8, {"cache": False})]


def test_what_one_call_compiled_ahead_another_one_times(speed, ask, monkeypatch, tmp_path):
    took = {"workers": 2, "seconds": 3.0, "jobs": [{"problem": "tiny", "first": 1.0, "failed": ""}]}
    monkeypatch.setattr(speed, "prepare", lambda *_: took)
    case = ("products", "--only", "tiny/GGN/1", "--ahead", str(tmp_path / "ahead.json"))
    assert speed.run(ask(*case, "--prepare", "2")) == tmp_path / "ahead.json"
    assert [path.name for path in tmp_path.iterdir()] == ["ahead.json"]
    speed.run(ask(*case, "--prepare", "2"))
    prepared = written(speed.run(ask(*case)))["prepared"]
    assert (prepared["seconds"], prepared["jobs"]) == (6.0, 2 * took["jobs"])


def test_a_worker_calls_a_product_until_it_is_compiled(part, lowered):
    job = {"problem": "tiny", "precision": "float32", "device": "cpu", "batch_size": 4, "tool": "ritz, compiled"}
    found = part("prepare").compile_one({**job, "matrix": "Hessian", "k": 2})
    assert (len(lowered), found["failed"]) == (1, "")
    assert found["first"] > 0


def test_workers_that_fail_are_told_of(part, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    job = {"problem": "none", "precision": "float32", "device": "cpu", "batch_size": 4, "tool": "gradient, compiled"}
    done = part("prepare").prepare([job], workers=2, patience=60)
    assert (done["workers"], done["cache was empty"]) == (1, True)
    assert done["jobs"] == [{**job, "first": None, "failed": "KeyError: 'none'", "said": []}]


def test_workers_for_which_there_is_no_time_are_told_of(part, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    job = {"problem": "tiny", "precision": "float32", "device": "cpu", "batch_size": 4, "tool": "gradient, compiled"}
    for patience, said in ((-1.0, "not begun: out of time"), (0.2, "out of time")):
        assert [job["failed"] for job in part("prepare").prepare([job], 1, patience)["jobs"]] == [said]


def test_rows_have_the_seconds_of_a_cold_cache_beside_those_of_a_full_one(part):
    jobs = [
        {"problem": "a", "precision": "tf32", "tool": "ritz, compiled", "matrix": "GGN", "k": 8, "first": 70.0},
        {"problem": "a", "precision": "tf32", "tool": "gradient, compiled", "first": 20.0},
    ]
    cold, case = part("prepare").cold, {"precision": "tf32", "matrix": "GGN", "k": 8}
    assert cold({"jobs": jobs}, "a", "ritz, compiled", case) == 70.0
    assert cold({"jobs": jobs}, "a", "gradient, compiled", case | {"k": 1}) == 20.0
    assert cold({"jobs": jobs}, "a", "ritz, compiled", case | {"k": 1}) is None
    assert cold(None, "a", "ritz, compiled", case) is None


def test_what_is_not_compiled_ahead_says_why(part, monkeypatch):
    def trace(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(compilation, "trace", trace)
    job = {"problem": "tiny", "precision": "float32", "device": "cpu", "batch_size": None, "tool": "ritz, compiled"}
    found = part("prepare").compile_one({**job, "matrix": "GGN", "k": 1})
    assert "OutOfMemoryError: no room" in found["failed"]


def test_what_could_not_be_compiled_ahead_is_not_tried_again(part, ask):
    case = {"precision": "float32", "matrix": "GGN", "k": 1}
    job = {"problem": "tiny", "tool": "ritz, compiled", **case, "first": None}
    args = ask("products", "--problems", "tiny", "--columns", "1", "--tools", "ritz*", "--compile")
    args.left, args.keep = (lambda: math.inf), lambda *_, **__: None
    args.prepared = {"jobs": [{**job, "failed": "out of time"}]}
    rows: list[dict] = []
    part("products")._Measured(args, part("problems").make("tiny", "cpu"), {}, "float32", "GGN", 1).add_to(rows)
    assert [(row["tool"], row["failed"]) for row in rows] == [
        ("ritz", ""), ("ritz, nothing kept", ""), ("ritz, compiled", "compiled ahead: out of time")
    ]  # fmt: skip
    short = {"jobs": [{**job, "failed": "OutOfMemoryError: "}]}
    assert part("prepare").failure(short, "tiny", "ritz, compiled", case) == ""  # there is more for one alone


def test_a_spectrum_prepares_for_no_number_of_vectors_that_was_not_warmed_up(part):
    H = ritz.Hessian(part("problems").make("tiny", "cpu").risk(compile=False))
    seen, plain = [], H._rows
    H._rows = lambda rows: seen.append((len(rows), H._aside)) or plain(rows)
    ritz.spectrum(H, num_steps=5)
    assert {width for width, aside in seen if not aside} == {part("prepare").WIDTH}


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found_by_another_process(speed, part, ask, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    args = ask("products", "--only", "tiny/GGN/1", "--tools", "ritz, compiled", "--compile", "--prepare", "1")
    args.patience = 600.0
    report = written(speed.run(args))
    assert [job["failed"] for job in report["prepared"]["jobs"]] == ["", ""]
    kept = sorted((tmp_path / "cache" / "fxgraph").rglob("*"))
    (row,) = [row for row in report["rows"] if row["tool"] == "ritz, compiled"]
    assert min(row["cold"], row["begun"]) > 0
    assert not row["failed"]
    again = part("prepare").prepare(part("prepare").jobs_of(args, part("products").cases(args)), 1, 600.0)
    assert sorted((tmp_path / "cache" / "fxgraph").rglob("*")) == kept  # nothing was compiled anew
    assert not again["cache was empty"]


def test_a_spectrum_compiles_once_for_each_number_of_vectors(speed, part, ask, lowered, monkeypatch):
    monkeypatch.setattr(part("tools"), "peer_arms", lambda *_: {})
    monkeypatch.setattr(part("accuracy"), "densities", lambda *_: {})
    args = ask("spectrum", "--problems", "tiny", "--compile", "--steps", "5", "--batch-size", "16")
    report = written(speed.run(args))
    assert [row["tool"] for row in report["rows"]] == [
        "ritz, 8 at a time", "ritz, compiled, 8 at a time", "ritz.spectrum"
    ]  # fmt: skip
    assert not any(row["failed"] for row in report["rows"])
    assert len(lowered) in (1, 2)  # one where the run went by products that are not compiled, being faster


def test_measures_are_told_in_runs_of_their_spectrum(speed, ask):
    report = written(speed.run(ask("measure", "--problems", "tiny", "--steps", "5", "--batch-size", "16")))
    spectrum, whole = report["rows"]
    (found,) = report["verdicts"]
    assert found["value"] == whole["seconds"] / spectrum["seconds"]
    assert "Hessian spectrum" in whole["runs"]


# ------------------------------------------------------------------------------------------ first results


def test_a_job_that_is_cut_is_extrapolated_from_its_last_calls(part):
    course = part("first").Course([5.0, 3.0, 1.0, 2.0, 1.0, 1.0], compiled=False, cut=True)
    assert course.total(8) == 5.0
    assert course.total(48) == 13.0
    assert course.total(80) == 17.0
    assert course.start == 7.0


def test_auto_compiles_long_jobs_and_leaves_short_ones_alone(speed, part, ask, lowered, monkeypatch):
    monkeypatch.setattr(compilation, "AUTO_ON", ("cpu",))
    monkeypatch.setattr(compilation, "_tools", lambda device: True)
    monkeypatch.setattr(compilation, "START", 0.5)
    monkeypatch.setattr(compilation, "EACH", 0.0)
    clock = iter(range(10_000))
    monkeypatch.setattr(compilation, "clock", lambda device: next(clock) / 128)  # a call takes 8 ms
    args = ask("first", "--problems", "tiny", "--lengths", "8", "80000", "--limit", "0.05", "--batch-size", "4")
    report = written(speed.run(args))
    rows = {(row["tool"], row["products"]): row for row in report["rows"]}
    assert [rows["compile='auto'", n]["compiled"] for n in (8, 80_000)] == [False, True]
    assert not any(rows["compile=False", n]["compiled"] for n in (8, 80_000))
    assert [rows["compile='auto'", n]["extrapolated"] for n in (8, 80_000)] == [False, True]
    assert len(report["verdicts"]) == 2


def test_where_compiling_pays_is_told(part, ask, lowered):
    args = ask("first", "--problems", "tiny", "--lengths", "8", "80", "--limit", "0.05", "--compile")
    args.left, args.keep = (lambda: math.inf), lambda *_, **__: None
    rows = part("first").first(args)["rows"]
    assert [row["products"] for row in rows if row["tool"] == "compile=True"] == [8, 80]
    (even,) = [row for row in rows if row["tool"].startswith("break-even")]
    assert even["products"] is None or even["products"] >= 0


# --------------------------------------------------------------------------------------------------- page


def test_figures_of_what_did_not_pay_are_those_of_the_files(part, tmp_path, capsys):
    rows = [{"tool": "a, b", "k": 8, "seconds": 0.0123}, {"tool": "a, b", "k": 1, "seconds": 0.5}]
    (tmp_path / "speed_x.json").write_text(json.dumps({"rows": rows}), encoding="utf8")
    text = "<!-- how -->\nFirst.\n\n- **One.** It took {speed_x | tool=a, b; k=8 | ms} ms\n  and paid.\n"
    text += "- **Two.** No figure.\n"
    missing = "- **Three.** {speed_y | k=8 | ms} ms\n- **Four.** {speed_x | tool=a, b | ms} ms\n"
    found = part("page").tried(text + missing, tmp_path)
    assert found == "First.\n\n- **One.** It took 12.3 ms and paid.\n- **Two.** No figure.\n"
    said = capsys.readouterr().out
    assert "there is no speed_y.json: - **Three.**" in said
    assert "2 rows" in said


def test_the_page_is_what_the_files_give(part, tmp_path):
    part("page").page(ROOT / "benchmarks" / "results", tmp_path)
    assert (tmp_path / "speed.md").read_text(encoding="utf8") == (ROOT / "docs" / "speed.md").read_text(encoding="utf8")
