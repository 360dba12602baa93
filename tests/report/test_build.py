"""A page has a section for what there is, and its data is that of the results."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch

import ritz
from ritz.loggers import JSONLines, Memory
from ritz.measures.margins import margin_distribution, margin_study
from ritz.operators import DenseOperator
from ritz.report import Page, build
from ritz.report.charts import Chart
from ritz.tables import Table

LIMIT = 3_000_000


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def charts(page: Page) -> dict[str, Chart]:
    """All charts by title."""
    blocks = [block for section in page.sections for block in section.blocks]
    found = [block for block in blocks if isinstance(block, Chart)]
    found += [chart for block in blocks if isinstance(block, list) for chart in block]
    return {chart.title: chart for chart in found}


def diagonal(values: list[float]) -> ritz.Spectrum:
    return ritz.spectrum(DenseOperator(torch.diag(torch.tensor(values))))


def test_a_page_of_everything_has_all_sections_in_order(results):
    page = build(*results.all(), settings={"seed": 0})
    assert titles(page) == [
        "Overview", "Comparison", "Spectrum", "Measures", "What moves when the function does not", "Margins",
        "Sample traces", "Training", "Cost", "Settings", "How to cite",
    ]  # fmt: skip
    assert len(page.to_html().encode()) < LIMIT / 5


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda r: r.measurement, ["Overview", "Spectrum", "Measures", "Margins", "Cost", "Settings"]),
        (lambda r: r.measurement.spectrum, ["Overview", "Spectrum"]),
        (lambda r: r.measurement.outputs, ["Margins"]),
        (lambda r: margin_distribution(r.measurement.outputs), ["Margins"]),
        (lambda r: r.comparison, ["Overview", "Comparison"]),
        (lambda r: r.traces, ["Sample traces"]),
        (lambda r: r.log, ["Training"]),
        (lambda r: r.blocks, ["Overview", "Spectrum"]),
        (lambda r: r.measurement["trace"], ["Overview"]),
        (lambda r: ritz.Estimate(name="diagonal", value=torch.ones(3)), ["Diagonal"]),
        (lambda r: Table(("a",), [("1",)], title="Mine"), ["Mine"]),
    ],
)
def test_sections_appear_for_what_there_is_alone(results, pick, expected):
    assert titles(build(pick(results))) == [*expected, "How to cite"]


def test_an_audit_brings_what_was_measured_before_it(results):
    assert "Measures" in titles(build(results.audit))
    beside = titles(build(results.audit, results.comparison))  # where it would be a solution once more
    assert "What moves when the function does not" in beside
    assert "Measures" not in beside


@pytest.mark.parametrize(("result", "match"), [({}, "got dict"), (3.0, "got float"), ({"a": 1}, "mapping of spectra")])
def test_what_is_no_result_is_refused(result, match):
    with pytest.raises(TypeError, match=match):
        build(result)


def test_nothing_and_two_of_a_kind_are_refused(results):
    with pytest.raises(ValueError, match="nothing to report"):
        build()
    with pytest.raises(ValueError, match=r"to compare solutions, use ritz\.compare"):
        build(results.measurement, results.measurement)
    with pytest.raises(ValueError, match="two spectra are called ''"):
        build(diagonal([1.0, 2.0]), diagonal([1.0, 3.0]))


def test_the_density_of_the_page_is_that_of_the_spectrum(results):
    spectrum = results.measurement.spectrum
    series = charts(build(spectrum))["Spectral density"].series
    grid = spectrum.default_grid(len(series[0]["x"]))
    truth = spectrum.density(grid)
    low, high = truth.interval()
    for name, values in (("x", grid), ("y", truth.value), ("low", low), ("high", high)):
        torch.testing.assert_close(torch.tensor(series[0][name]).double(), values, rtol=6e-5, atol=1e-300)
    torch.testing.assert_close(torch.tensor(series[1]["x"]), spectrum.head, rtol=6e-5, atol=0)


def test_the_whole_matrix_and_its_blocks_share_a_chart(results):
    chart = charts(build(results.measurement.spectrum, results.blocks))["Spectral density"]
    assert [s["name"] for s in chart.series if s["kind"] == "line"] == ["whole", *results.blocks]


def test_many_spectra_stay_small_and_it_says_what_is_left_out():
    values = torch.linspace(-1, 2, 60)
    many = {f"layer {place}.weight": diagonal((values * (1 + place)).tolist()) for place in range(160)}
    page = build(many)
    assert "The first 150 of 160 are drawn." in charts(page)["Spectral density"].caption
    assert len(page.to_html().encode()) < LIMIT


def test_traces_of_parameters_add_up_to_the_trace(results):
    series = charts(build(results.measurement))["Trace, parameter by parameter"].series[0]
    assert sum(series["x"]) == pytest.approx(float(results.measurement["trace"].value), rel=1e-4)
    assert all(low <= x <= high for low, x, high in zip(series["xlow"], series["x"], series["xhigh"], strict=True))


def test_the_histogram_holds_every_item_and_the_box_its_quartiles(results):
    found, outputs = charts(build(results.measurement)), results.measurement.outputs
    counts = [sum(series["y"]) for series in found["Output margins"].series]
    assert counts == [int(outputs.correct.sum()), int((~outputs.correct).sum())]
    box = found["Output margins, box plot"].series[0]["box"]
    truth = torch.quantile(outputs.margin, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(torch.tensor(box[1:4]), truth, rtol=1e-4, atol=0)


def test_every_sample_stands_at_its_margin_and_trace(results):
    series = charts(build(results.measurement, results.traces))["Trace against output margin"].series
    found = {text: (x, y) for s in series[:2] for text, x, y in zip(s["text"], s["x"], s["y"], strict=True)}
    margin, trace = results.measurement.outputs.margin, results.traces.value
    assert len(found) == len(trace)
    for place in range(len(trace)):
        assert found[f"sample {place}"] == pytest.approx((float(margin[place]), float(trace[place])), rel=1e-4)


def test_samples_of_a_study_keep_their_own_margins(results):
    study = margin_study(results.risk, 25, seed=3)
    series = charts(build(results.measurement, study))["Trace against output margin"].series
    drawn = sorted((x, y) for s in series[:2] for x, y in zip(s["x"], s["y"], strict=True))
    truth = sorted(zip(study.margin.bound.tolist(), study.margin.traces.tolist(), strict=True))
    torch.testing.assert_close(torch.tensor(drawn), torch.tensor(truth), rtol=1e-4, atol=1e-12)


def test_traces_that_are_all_the_same_have_no_correlation_and_it_says_why(results):
    same = ritz.Estimate(name="sample traces", value=torch.ones(60), exact=True)
    assert "The correlation of trace and margin does not exist: " in build(results.measurement.outputs, same).to_html()


def test_traces_without_their_margins_are_shown_by_themselves(results):
    other = ritz.Estimate(name="sample traces", value=torch.ones(7), exact=True)  # of other samples
    assert "Trace against output margin" not in charts(build(results.measurement, other))


def test_the_marks_of_the_small_graphs_do_not_run_into_one_another(results):
    page = build(results.measurement).to_html()
    (scale,) = re.findall(r'<svg class="strip"[^>]*marks at .*?</svg>', page)
    marks = sorted((float(x), text) for x, text in re.findall(r'<text x="([\d.]+)" y="14">(.*?)</text>', scale))
    assert [text for _, text in marks] == ["100", "10", "1", "± %", "1", "10", "100"]
    halves = [(x, 2.6 * len(text)) for x, text in marks]  # of letters that are 9 pixels high
    assert all(x - half > left + own + 2 for (left, own), (x, half) in pairwise(halves))


def test_every_measure_stands_in_the_table_with_its_interval_and_reading(results):
    page = build(results.measurement).to_html()
    for key, reading in results.measurement.readings.items():
        assert f"<summary>{key}</summary>" in page
        assert ritz.tables.html.escape(reading) in page
    for why in results.measurement.failures.values():
        assert ritz.tables.html.escape(why) in page


def test_the_audit_marks_what_moved(results):
    page = build(results.audit).to_html()
    verdicts = [shift.verdict for shift in results.audit.shifts.values()]
    assert page.count('<td class="moved"') == verdicts.count("moved") > 0
    assert page.count('<td class="same"') == verdicts.count("unchanged") > 0


def test_a_comparison_shows_values_verdicts_and_agreement(results):
    page = build(results.comparison)
    text = page.to_html()
    assert results.comparison["trace"].verdict.split(";")[0].replace("<", "&lt;").replace(">", "&gt;") in text
    chart = charts(page)["The gap in loss against a measure"]
    assert chart.choices[0]["name"] == "trace"
    for series, found in zip(chart.series, results.comparison.measurements.values(), strict=True):
        assert series["x"] == [pytest.approx(float(found["trace"].value), rel=1e-4)]


def test_a_training_log_has_errors_as_bands_and_no_charts_of_them(results):
    found = charts(build(results.log))
    series = found["Largest curvature"].series
    assert [s["name"] for s in series] == ["curvature/largest"]
    assert series[0]["low"][0] == pytest.approx(1.9)
    assert {s["name"] for s in found["Learning rate and damping"].series} == {"lr", "damping"}


def test_eigenvalues_and_traces_along_training_have_charts_of_their_own():
    log = Memory()
    for step in (1, 2):
        log.log(
            {"curvature/hessian/lambda_max": 2.0, "curvature/hessian/lambda_min": -0.1, "curvature/hessian/trace": 9.0,
             "curvature/hessian/trace/0.weight": 5.0, "track/seconds": 3.0, "track/share": 0.04, "track/skipped": 0.0},
            step,
        )  # fmt: skip
    found = {title: [s["name"] for s in chart.series] for title, chart in charts(build(log)).items()}
    assert found == {
        "Largest curvature": ["curvature/hessian/lambda_max"],
        "Trace": ["curvature/hessian/trace"],
        "Trace, parameter by parameter": ["curvature/hessian/trace/0.weight"],
        "Most negative curvature": ["curvature/hessian/lambda_min"],
        "Time spent on looking": ["track/share"],
    }


def test_the_ends_of_an_interval_can_be_told_apart(results):
    estimate = ritz.Estimate(name="trace", value=0.1129, bracket=(0.112907, 0.112912))
    assert "0.112907 to 0.112912" in build(estimate).to_html()
    text = build(results.measurement).to_html()
    ends = re.findall(r">([^<>]+) to ([^<>]+)<", text)
    assert len(ends) > 20
    assert all(low != high for low, high in ends)


def test_a_value_of_a_comparison_has_its_error_below_it(results):
    text = build(results.comparison).to_html()
    trace = results.comparison.measurements["half"]["gap_loss"]
    assert f"{float(trace.value):.4g}<small>± {float(trace.stderr):.2g}</small>" in text.replace("−", "-")
    exact = results.comparison.measurements["half"]["weight_norm"]
    assert f">{float(exact.value):.4g}</td>" in text


def test_numbers_in_notes_are_typeset(results):
    assert "falls by −0.5 to 2·10⁻⁵" in build(results.log, notes=["falls by -0.5 to 2e-05"]).to_html()


def test_a_log_is_read_from_a_file_or_its_path(tmp_path):
    log = JSONLines(tmp_path / "train.jsonl")
    log.log({"loss": 2.0}, 0)
    log.log({"loss": 1.0}, 5)
    for given in (log, log.path, str(log.path)):
        assert charts(build(given))["Loss"].series[0]["y"] == [2, 1]


def test_a_long_log_is_thinned_and_keeps_its_spikes():
    log = Memory()
    for step in range(5000):
        log.log({"loss": 100.0 if step == 3333 else 1.0 + step % 2, "[odd]*name": 1.0}, step)
    found = charts(build(log))
    chart = found["Loss"]
    assert len(chart.series[0]["x"]) <= 1200
    assert max(chart.series[0]["y"]) == 100
    assert "Thinned" in chart.caption
    assert "[odd]*name" in found


def test_settings_are_laid_flat(results):
    text = build(results.log, settings={"a": {"b": 1.5, "c": [1, None]}, "d": "e", "f": True}).to_html()
    for name, value in (("a.b", "1.5"), ("a.c", "1, none"), ("d", "e"), ("f", "yes")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text


def test_what_decides_a_measurement_is_among_the_settings_once(results):
    assert "<dt>num_probes</dt><dd>3</dd>" in build(results.measurement, settings={"lr": 1}).to_html()
    assert "<dt>num_probes</dt>" not in build(results.measurement, settings={"run": {"num_probes": 3}}).to_html()


def test_data_is_json_without_nan_and_without_markup(results):
    text = build(*results.all()).to_html()
    data = re.search(r'<script type="application/json" id="ritz-charts">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in data
    assert "NaN" not in data
    specs = json.loads(data)
    assert [spec["id"] for spec in specs] == [f"ritz-chart-{place}" for place in range(len(specs))]
    assert all(f'<figure id="{spec["id"]}"' in text for spec in specs)


def test_one_probe_and_one_eigenvalue_make_a_page():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(120, 120, generator=generator)
    one = ritz.spectrum(DenseOperator(matrix + matrix.T), num_probes=1, num_steps=5)
    assert "NaN" not in build(one).to_html().split("</style>")[0]
    for values in ([3.0], [0.0, 0.0], [2.0, 2.0]):
        series = charts(build(diagonal(values)))["Spectral density"].series[0]
        assert all(y is not None and math.isfinite(y) for y in series["y"])


def test_a_regression_has_no_margins_and_says_why():
    X = torch.linspace(-1, 1, 12)[:, None]
    risk = ritz.Risk(torch.nn.Linear(1, 1).double(), torch.nn.MSELoss(), (X, X**2))
    page = build(ritz.measure(risk, measures=["trace", "margin_median"]))
    assert "Margins" not in titles(page)
    assert "this needs classes and labels" in page.to_html()


def test_building_a_page_changes_no_result(results):
    before = results.measurement.spectrum.density().value.clone()
    rows = [dict(row) for row in results.log.rows]
    build(*results.all()).to_html()
    assert torch.equal(results.measurement.spectrum.density().value, before)
    assert results.log.rows == rows


def test_the_same_results_make_the_same_page(results):
    assert build(*results.all()).to_html() == build(*results.all()).to_html()


def test_a_key_figure_lies_within_the_interval_below_it():
    found = ritz.Estimate(name="sharpness", value=1251.82951, bracket=(1251.829498, 1251.829523))
    text = build(found).to_html()
    assert '<dd class="value">1,251.829510</dd><dd class="range">1,251.829498 to 1,251.829523</dd>' in text


def test_a_table_of_ones_own_has_its_title_once():
    text = build(Table(("a",), [("1",)], title="My table")).to_html()
    assert "<h2>My table</h2>" in text
    assert "<caption>" not in text
