"""A page in a real browser: it is drawn, it answers, it asks for nothing, and nothing of the user's is run."""

import base64
import csv
import json
import math
import re
import time

import pytest
import torch

import ritz
from ritz.measures.compare import ranked
from ritz.measures.outputs import Outputs
from ritz.measures.registry import MEASURES
from ritz.report import build

LIMIT = 3_000_000  # bytes of a page


@pytest.fixture
def opened(browser, page_file):
    browser.open(page_file)
    return browser


def chart(browser, title: str) -> str:
    """The selector of the figure with this title."""
    script = f"[...document.querySelectorAll('figure h3')].find(h => h.textContent === {json.dumps(title)})"
    return "#" + browser.run(f"{script}.parentNode.id")


def text(browser, selector: str) -> str:
    return browser.run(f"document.querySelector({json.dumps(selector)}).textContent")


def test_a_page_of_everything_draws_every_chart_without_a_complaint(opened, page_file):
    figures = opened.run("document.querySelectorAll('figure.chart').length")
    assert figures > 12
    assert opened.run("document.documentElement.dataset.ready") == str(figures)
    empty = opened.run(
        "[...document.querySelectorAll('figure.chart')].filter(f => !f.querySelector('svg path')).length"
    )
    assert empty == 0
    assert "NaN" not in opened.run("[...document.querySelectorAll('.stage svg')].map(s => s.outerHTML).join('')")
    assert opened.complaints() == []
    assert opened.requests() == [page_file.as_uri()]


def test_names_of_the_user_are_text_and_nothing_else(opened):
    assert opened.run("typeof hacked") == "undefined"
    assert opened.run("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
    assert opened.run("document.scripts.length") == 2
    assert opened.run("document.querySelectorAll('[onerror], [onload], [style*=expression]').length") == 0
    assert "<img src=x onerror=hacked=1>" in text(opened, "main")
    assert text(opened, "h1") == "</script><script>hacked=2</script> & <img src=x onerror=hacked=1>"
    assert text(opened, f"{chart(opened, 'Trace, parameter by parameter')} .row title").startswith("<img")


def test_even_markup_that_gets_in_is_not_run(opened):
    opened.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"x:\" onerror=\"window.hacked = 4\">')")
    opened.run("new Promise(done => setTimeout(done, 100))")
    assert opened.run("typeof hacked") == "undefined"
    assert any("Content Security Policy" in line for line in opened.complaints())


def test_the_read_out_tells_the_value_under_the_pointer(opened, results):
    figure = chart(opened, "Spectral density")
    left, top, width, height = opened.place(f"{figure} .stage")
    opened.mouse("mouseMoved", left + width / 2, top + height / 2)
    shown = text(opened, f"{figure} .readout")
    spec = next(s for s in opened.run("JSON.parse(document.getElementById('ritz-charts').textContent)")
                if f"#{s['id']}" == figure)  # fmt: skip
    found = re.match(r"eigenvalue (\S+?)whole (\S+?) ", shown)
    place = min(range(len(spec["series"][0]["x"])), key=lambda i: abs(spec["series"][0]["x"][i] - float(found[1])))
    spectrum = results.measurement.spectrum
    truth = float(spectrum.density(spectrum.default_grid(400)).value[place])
    assert math.isclose(spec["series"][0]["y"][place], truth, rel_tol=1e-4)
    assert number(found[2]) == pytest.approx(truth, rel=1e-3)
    opened.mouse("mouseMoved", left + width / 2, top - 300)
    assert opened.run(f"document.querySelector('{figure} .readout').hidden")


def number(text: str) -> float:
    """Back from how the page writes it."""
    plain = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")).replace("·10", "e").replace(",", "")
    return float(plain if not plain.startswith("10-") else plain.replace("10-", "1e-"))


def test_the_log_switch_changes_the_axis_and_says_so(opened):
    figure = chart(opened, "Spectral density")
    ticks = f"[...document.querySelectorAll('{figure} .grid text')].map(t => t.textContent).join()"
    pressed = f"document.querySelector('{figure} [data-log=y]').getAttribute('aria-pressed')"
    before = opened.run(ticks)
    assert opened.run(pressed) == "true"
    opened.click(f"{figure} [data-log=y]")
    assert opened.run(pressed) == "false"
    assert opened.run(ticks) != before
    opened.click(f"{figure} [data-log=y]")
    assert opened.run(ticks) == before


def test_the_legend_hides_a_series_and_brings_it_back(opened):
    figure = chart(opened, "Spectral density")
    curves = f"document.querySelectorAll('{figure} .curve').length"
    rugs = f"document.querySelectorAll('{figure} .rug').length"
    before = opened.run(curves), opened.run(rugs)
    opened.click(f"{figure} .key")
    assert (opened.run(curves), opened.run(rugs)) == (before[0] - 1, before[1] - 1)
    assert opened.run("document.activeElement.classList.contains('key')")
    opened.click(f"{figure} .key")
    assert (opened.run(curves), opened.run(rugs)) == before


def test_dragging_zooms_and_reset_shows_all_again(opened):
    figure = chart(opened, "Spectral density")
    ticks = f"[...document.querySelectorAll('{figure} .grid text')].map(t => t.textContent).join()"
    before = opened.run(ticks)
    left, top, width, height = opened.place(f"{figure} .stage")
    middle = top + height / 2
    opened.mouse("mousePressed", left + 0.3 * width, middle)
    opened.mouse("mouseMoved", left + 0.4 * width, middle, buttons=1)
    opened.mouse("mouseReleased", left + 0.5 * width, middle)
    assert opened.run(ticks) != before
    assert not opened.run(f"document.querySelector('{figure} .switches [title^=Show]').hidden")
    opened.click(f"{figure} .switches [title^=Show]")
    assert opened.run(ticks) == before


def test_charts_of_training_share_crosshair_and_zoom(opened):
    figure, other = chart(opened, "Loss"), chart(opened, "Learning rate and damping")
    left, top, width, height = opened.place(f"{figure} .stage")
    opened.mouse("mouseMoved", left + width / 2, top + height / 2)
    assert opened.run(f"document.querySelectorAll('{other} .hair').length") == 1
    assert opened.run(f"document.querySelectorAll('{other} .linked').length") == 2
    ticks = f"[...document.querySelectorAll('{other} .grid text')].map(t => t.textContent).join()"
    before = opened.run(ticks)
    opened.mouse("mousePressed", left + 0.4 * width, top + height / 2)
    opened.mouse("mouseReleased", left + 0.6 * width, top + height / 2)
    assert opened.run(ticks) != before


def test_keys_walk_along_a_chart_zoom_and_speak(opened):
    figure = chart(opened, "Output margins")
    opened.run(f"document.querySelector('{figure} .stage').focus()")
    opened.key("ArrowRight")
    first = text(opened, f"{figure} [aria-live]")
    assert first.startswith("output margin") or " to " in first
    opened.key("ArrowRight")
    assert text(opened, f"{figure} [aria-live]") != first
    ticks = f"[...document.querySelectorAll('{figure} .grid text')].map(t => t.textContent).join()"
    before = opened.run(ticks)
    opened.key("+")
    assert opened.run(ticks) != before
    opened.key("Escape")
    assert opened.run(ticks) == before
    for _ in range(60):  # as deep as it goes
        opened.run(
            f"document.querySelector('{figure} .stage').dispatchEvent(new KeyboardEvent('keydown', {{key: '+'}}))"
        )
    assert "NaN" not in opened.run(f"document.querySelector('{figure} svg').outerHTML")


def test_points_can_be_read_one_by_one(opened, results):
    figure = chart(opened, "Trace against output margin")
    opened.run(f"document.querySelector('{figure} .stage').focus()")
    opened.key("Home")
    margins = results.measurement.outputs.margin
    least = int(torch.where(results.measurement.outputs.correct, margins, math.inf).argmin())
    assert f"sample {least}" in text(opened, f"{figure} [aria-live]")


def test_another_measure_can_be_chosen(opened):
    figure = chart(opened, "The gap in loss against a measure")
    select = f"document.querySelector('{figure} select')"
    names = opened.run(f"[...{select}.options].map(o => o.textContent)")
    assert names[0] == "trace"
    opened.run(f"{select}.value = 1; {select}.dispatchEvent(new Event('change'))")
    assert names[1] in opened.run(f"[...document.querySelectorAll('{figure} .title')].map(t => t.textContent)")


def test_the_numbers_of_a_chart_can_be_saved(opened, results, tmp_path):
    opened.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    opened.click(f"{chart(opened, 'Trace, parameter by parameter')} [title^=Save]")
    end = time.monotonic() + 10
    while not (found := list(tmp_path.glob("*.csv"))) and time.monotonic() < end:
        time.sleep(0.02)
    with found[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    truth = [float(part.value) for part in results.measurement.spectrum.trace.parts.values()]
    assert [float(row["Tr H of the diagonal block"]) for row in rows] == pytest.approx(truth, rel=1e-4)


def test_the_filter_keeps_the_rows_that_fit(opened):
    opened.run(
        "const f = document.querySelector('[data-filter]'); f.value = 'margin_me'; f.dispatchEvent(new Event('input'))"
    )
    rows = opened.run("[...document.querySelectorAll('#ritz-measures tr[data-row]')].filter(r => r.offsetParent)"
                      ".map(r => r.querySelector('summary').textContent)")  # fmt: skip
    assert rows == ["margin_median"]


def test_theme_follows_the_system_until_it_is_chosen(browser, page_file):
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    browser.open(page_file)
    light = browser.run(paper)
    browser.open(page_file, dark=True)
    dark = browser.run(paper)
    assert light != dark
    browser.click("#ritz-theme")
    assert browser.run(paper) == light
    for _ in range(10):  # it is remembered, once the browser's processes have told each other
        browser.open(page_file, dark=True)
        if browser.run(paper) == light:
            break
        time.sleep(0.2)
    assert browser.run(paper) == light
    browser.run("localStorage.clear()")


def test_on_a_phone_nothing_sticks_out(browser, page_file):
    browser.open(page_file, width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("[...document.querySelectorAll('figure')].every(f => f.getBoundingClientRect().right <= 390)")
    assert browser.complaints() == []


def test_it_prints_light_and_without_controls(browser, page_file):
    browser.open(page_file, width=690, dark=True, media="print")
    assert browser.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    hidden = "['nav', '#ritz-theme', '.switches', '.filter'].every(s => !document.querySelector(s).offsetParent)"
    assert browser.run(hidden)
    assert browser.run("document.documentElement.scrollWidth") <= 690
    browser.open(page_file)
    paper = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    assert browser.complaints() == []


def test_on_paper_no_line_is_cut_and_charts_are_low(browser, page_file):
    browser.open(page_file, width=690, media="print")
    assert browser.run("[...document.querySelectorAll('pre')].every(p => p.scrollWidth <= p.clientWidth)")
    density = f"document.querySelector('{chart(browser, 'Spectral density')} .stage svg').viewBox.baseVal.height"
    on_screen = browser.run(density)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(density) < on_screen
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(density) == on_screen


def test_a_headline_stands_above_the_rest(browser, page_file):
    browser.open(page_file)
    size = "parseFloat(getComputedStyle(document.querySelector('{}')).fontSize)"
    assert browser.run(size.format("#s-overview > p")) > browser.run(size.format("#s-comparison > p"))


def test_fifty_thousand_samples_fit_and_are_said_to_be_thinned(browser, tmp_path):
    generator = torch.Generator().manual_seed(0)
    margin = 3 * torch.randn(50_000, generator=generator) + 5
    outputs = Outputs(loss=torch.exp(-margin), weight=torch.ones(50_000), margin=margin, classes=10)
    traces = ritz.Estimate(name="sample traces", value=torch.exp(-margin / 2), exact=True)
    path = build(outputs, traces).write(tmp_path / "page.html")
    assert path.stat().st_size < LIMIT / 5
    browser.open(path)
    figure = chart(browser, "Trace against output margin")
    assert "of 50,000 samples are drawn" in text(browser, figure)
    assert browser.complaints() == []


def test_numbers_that_are_no_numbers_do_not_stop_a_chart(browser, tmp_path):
    log = ritz.loggers.Memory()
    for step, loss in enumerate([1.0, math.nan, math.inf, -1.0, 1e300, 0.0]):
        log.log({"loss": loss, "flat": 2.0, "never": math.nan}, step)
    browser.open(build(log).write(tmp_path / "page.html"))
    assert browser.run("document.documentElement.dataset.ready") == "2"
    assert "NaN" not in browser.run("[...document.querySelectorAll('.stage svg')].map(s => s.outerHTML).join('')")
    browser.click(f"{chart(browser, 'Loss')} [data-log=y]")
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [1280, 690, 390])
def test_key_figures_leave_no_cell_empty(browser, tmp_path, width):
    for count in (4, 7):
        figures = [ritz.Estimate(name=f"figure {n}", value=float(n), exact=True) for n in range(count)]
        browser.open(build(*figures).write(tmp_path / "page.html"), width=width)
        ends = browser.run(
            "(() => { const rows = {}; for (const tile of document.querySelectorAll('.tile')) { "
            "const r = tile.getBoundingClientRect(); rows[r.top] = Math.max(rows[r.top] || 0, r.right); } "
            "return Object.values(rows); })()"
        )
        assert max(ends) - min(ends) < 2  # every row of tiles reaches the right edge


def test_four_solutions_with_long_names_fit_on_a_laptop(browser, tmp_path, results):
    one = results.comparison.measurements["half"]
    names = [f"weight decay {decay}" for decay in ("0", "0.0001", "0.0005", "0.005")]
    found = ranked(dict.fromkeys(names, one), [MEASURES[key] for key in one])
    browser.open(build(found).write(tmp_path / "page.html"), width=1280)
    assert browser.run("(() => { const box = document.querySelector('.compared').parentNode; "
                       "return box.scrollWidth - box.clientWidth; })()") == 0  # fmt: skip


def test_forty_solutions_with_long_names_are_told_apart_and_fit(browser, tmp_path, results):
    one = results.comparison.measurements["half"]
    names = [f"resnet18_cifar100_lr0.1_wd5e-4_seed{seed}_epoch200_final" for seed in range(40)]
    page = build(ranked(dict.fromkeys(names, one), [MEASURES[key] for key in one])).write(tmp_path / "page.html")
    browser.open(page)
    assert browser.run("[...document.querySelectorAll('p.legend .key')].map(k => k.textContent)") == [
        f"…seed{seed}…" for seed in range(40)
    ]
    assert browser.run("document.querySelector('p.legend .key').title") == names[0]
    for where in ({"width": 1200}, {"width": 390}, {"width": 700, "media": "print"}):
        browser.open(page, **where)
        for hidden in ("p.legend", "#s-comparison .scroll"):
            box = f"document.querySelector({json.dumps(hidden)})"
            assert browser.run(f"[{box}.scrollHeight - {box}.clientHeight, {box}.scrollWidth - {box}.clientWidth]") == [
                0,
                0,
            ]
    assert browser.complaints() == []


def test_colours_in_a_table_of_many_solutions_are_those_of_the_charts(browser, tmp_path, results):
    one = results.comparison.measurements["half"]
    names = [f"s{seed}" for seed in range(10)]
    browser.open(build(ranked(dict.fromkeys(names, one), [MEASURES[key] for key in one])).write(tmp_path / "page.html"))

    def colours(legend):
        keys = f"[...document.querySelectorAll('{legend} .key')].slice(0, 10)"
        return browser.run(f"{keys}.map(k => getComputedStyle(k.children[0]).backgroundColor)")

    assert colours("p.legend") == colours("figure .legend")


def test_names_of_layers_that_are_too_long_for_a_chart_keep_their_ends(browser, tmp_path):
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_layer_0_attention_query_projection = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.encoder_layer_0_attention_query_projection(x)

    X, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    s = ritz.spectrum(ritz.Hessian(ritz.Risk(Deep(), torch.nn.CrossEntropyLoss(), (X, y))), 5, 2)
    browser.open(build(s).write(tmp_path / "page.html"))
    shown = browser.run("[...document.querySelectorAll('text.row')].map(t => t.firstChild.textContent)")
    assert len(set(shown[:2])) == 2
    assert shown[0].startswith("…")
    assert shown[0].endswith("projection.weight")
