"""The pictures of report.md: `python docs/report.py [FOLDER]`; chromium takes them, in a minute or two.

All settings are in this file.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import ritz
from ritz.report import build

WIDTH, DECAY, STEPS = 1280, 1e-3, 300
SIZES = {"light": ("", 1180), "dark": ("#s-sample-traces", 830)}


def page():
    """A report of all that there is on one network of digits."""
    pixels, labels = load_digits(return_X_y=True)
    X, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(X))
    data, test = ((X[rows], y[rows]) for rows in (order[:1000], order[1000:]))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=DECAY)
    risk, log = ritz.Risk(model, nn.CrossEntropyLoss(), data), ritz.loggers.Memory()
    for step in range(STEPS):
        rows = torch.randint(1000, (100,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0][rows]), data[1][rows])
        loss.backward()
        optimizer.step()
        log.log({"loss": loss.item()}, step)
    H = ritz.Hessian(risk)
    return build(
        ritz.measure(risk, test, num_steps=40),
        ritz.audit(
            risk, test, measures=["trace", "lambda_max", "weight_norm", "margin_median"], num_steps=10, num_probes=4
        ),
        ritz.sample_traces(risk),
        {f"layer {name}": ritz.spectrum(H.block(f"{name}.*"), num_steps=40) for name in ("0", "2")},
        log,
        title=f"A digits network, weight decay {DECAY}",
        settings={"lr": 0.1, "momentum": 0.9, "weight_decay": DECAY, "steps": STEPS, "batch_size": 100},
    )


def main(folder):
    """One light, one dark: the policy of the page is taken off, so that a style can be put in."""
    html = re.sub("<meta http-equiv[^>]*>", "", page().to_html())
    with tempfile.TemporaryDirectory() as scratch:
        for theme, (section, height) in SIZES.items():
            style = f":root {{ color-scheme: {theme} !important; }}"
            style += f"main section:not({section}) {{ display: none; }}" if section else ""
            file, picture = Path(scratch) / f"{theme}.html", (folder / f"report-{theme}.png").resolve()
            file.write_text(html.replace("</head>", f"<style>{style}</style></head>", 1), encoding="utf-8")
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            options += ["--virtual-time-budget=3000", f"--window-size={WIDTH},{height}", f"--screenshot={picture}"]
            options += [f"--user-data-dir={scratch}/user"]
            subprocess.run(["chromium", *options, file.as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
