"""A real browser for the tests of pages: Debian's chromium, driven over a pipe by the DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ritz
from ritz.loggers import Memory
from ritz.measures.audit import Audit
from ritz.measures.compare import Comparison
from ritz.measures.measure import Measurement
from ritz.report import build

PATIENCE = 30.0  # seconds for one answer, on a busy machine


class Browser:
    """One headless browser with one page at a time. `events` holds what it told since the page was opened."""

    def __init__(self, program: str, folder: str) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        # the browser reads from descriptor 3 and writes to 4
        command = (
            'exec "$0" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run '
            "--disable-extensions --disable-background-networking --disable-component-update --hide-scrollbars "
            f'--remote-debugging-pipe --user-data-dir="$1" about:blank 3<&{to_child} 4>&{from_child}'
        )
        self.process = subprocess.Popen(
            ["bash", "-c", command, program, folder], pass_fds=(to_child, from_child), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._count, self._buffer, self.events, self.session = 0, b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict:
        """One command, and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("the browser does not answer")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Load a page and wait until its charts are drawn."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while not self.run("document.readyState === 'complete' && 'ready' in document.documentElement.dataset"):
            assert time.monotonic() < end, f"the page did not get ready: {self.complaints()}"
            time.sleep(0.02)

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into the middle of the view."""
        quoted = json.dumps(selector)
        self.run(f"document.querySelector({quoted}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        found = self.run(
            f"(() => {{ const r = document.querySelector({quoted}).getBoundingClientRect(); "
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        return tuple(found)

    def mouse(self, kind: str, x: float, y: float, **about: object) -> None:
        """A real movement or press of the mouse: "mouseMoved", "mousePressed" or "mouseReleased"."""
        held = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held, **about)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        left, top, width, height = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, left + width / 2, top + height / 2)

    def key(self, key: str) -> None:
        """A key, down and up."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, whole: bool = False) -> Path:
        """A PNG of what is seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and exceptions, since the page was opened."""
        self.call("Runtime.evaluate", expression="0")  # what is on its way arrives before the answer
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return sent

    def close(self) -> None:
        """Ends the browser; it is killed where it does not go by itself."""
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close")
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)
        os.close(self._write)


HOSTILE = "<img src=x onerror=hacked=1>"  # no dot in it: it is also the name of a layer
CLOSING = "</script><script>hacked=2</script>"


@dataclass
class Results:
    """Of one small network, whose layers and solutions have names that must not become part of a page."""

    risk: ritz.Risk
    measurement: Measurement
    audit: Audit
    comparison: Comparison
    traces: ritz.Estimate
    blocks: dict[str, ritz.Spectrum]
    log: Memory

    def all(self) -> tuple[object, ...]:
        """As `build` takes them."""
        return self.measurement, self.audit, self.comparison, self.traces, self.blocks, self.log


@pytest.fixture(scope="session")
def results() -> Results:
    """All kinds of results."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = (X[:, :3] + 0.8 * torch.randn(60, 3, generator=generator, dtype=torch.float64)).argmax(1)
    model = nn.Sequential()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, layer in ((HOSTILE, nn.Linear(4, 24)), ("relu", nn.ReLU()), ("last", nn.Linear(24, 3))):
            model.add_module(name, layer.double())
    log = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), y)
        loss.backward()
        optimizer.step()
        damped = (
            {"damping": 0.1 / (step + 1), "curvature/largest": 2.0, "curvature/residual": 0.1} if step % 5 == 0 else {}
        )
        log.log({"loss": loss.item(), "lr": 0.3, f"{HOSTILE}/scalar": float(step), **damped}, step)
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (X, y))
    test = (X + 0.5, y)
    short = {"num_steps": 8, "num_probes": 3}
    half = risk.at({name: p / 2 for name, p in risk.params().items()})
    keys = ["gap_loss", "trace", "lambda_max", "weight_norm", "margin_median"]
    return Results(
        risk=risk,
        measurement=ritz.measure(risk, test, **short),
        audit=ritz.audit(risk, test, measures=keys, **short),
        comparison=ritz.compare({HOSTILE: risk, "half": half}, test, measures=keys, **short),
        traces=ritz.sample_traces(risk),
        blocks={name: ritz.spectrum(ritz.Hessian(risk).block(name), **short) for name in (f"{HOSTILE}.*", "last.*")},
        log=log,
    )


@pytest.fixture(scope="session")
def page_file(results, tmp_path_factory) -> Path:
    """A page of all of them."""
    settings = {"path": f"{CLOSING}/{HOSTILE}", "nested": {HOSTILE: '" onload="hacked=3'}}
    made = build(*results.all(), title=f"{CLOSING} & {HOSTILE}", settings=settings, notes=[HOSTILE])
    return made.write(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser; tests that ask for it are skipped where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    folder = tempfile.mkdtemp(prefix="ritz-browser-")
    made = Browser(program, folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)
