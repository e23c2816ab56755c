"""Make the charts of the README from measured data.

python docs/make_charts.py measure            # run the benches (some minutes, on an idle machine), then draw
python docs/make_charts.py measure --quick    # the same with fewer rounds, for a first look
python docs/make_charts.py                    # draw the SVGs from docs/charts/measurements.json

Here: which figures of `bench.json` are shown, and drawing. A test checks that the committed SVGs are drawn from the
committed measurements.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "charts"
MEASUREMENTS = FOLDER / "measurements.json"
COMMANDS = {"speed": "syncline bench training", "recovery": "syncline bench recovery"}
_MODELS = {"lenet": "LeNet", "resnet18": "ResNet-18"}
_SETTINGS = {"defaults": "defaults", "same-settings": "same settings"}
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 640, 190, 130, 58, 34, 18
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 15px }
.small { font-size: 11px; fill: #57606a } .ours { fill: #0f8b7d } .theirs { fill: #afb8c1 }
.line { stroke: #24292f; stroke-width: 1.5 } .reference { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .ours { fill: #2fb5a5 } .theirs { fill: #59636e }
  .line { stroke: #e6edf3 } .reference { stroke: #9198a1 }
}"""


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Run both benches, and keep the figures that the charts show."""
    commands = {name: f"{command} --quick" if quick else command for name, command in COMMANDS.items()}
    reports = {name: _bench(command) for name, command in commands.items()}
    return {
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "commands": commands,
        "machine": reports["speed"]["machine"],
        "speed": speed_figures(reports["speed"]),
        "recovery": recovery_figures(reports["recovery"]),
    }


def speed_figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Syncline's throughput relative to DDP, one figure per model and settings."""
    found = []
    for suite in report["suites"]:
        _, model, settings = suite["name"].split("-", 2)
        ours = next(c for c in suite["contenders"] if c["name"] == "syncline")
        label = f"{_MODELS[model]}, {_SETTINGS[settings]}"
        found.append({"label": label, "baseline": suite["baseline"], **_quartiles(ours["ratio"])})
    return found


def recovery_figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds lost per killed worker, one figure per contender."""
    suite = next(s for s in report["suites"] if s["name"] == "recovery")
    labels = {"syncline": "Syncline", "torchrun, DDP": "torchrun with DDP"}
    return [{"label": labels[c["name"]], **_quartiles(c["spread"])} for c in reversed(suite["contenders"])]


def draw(data: dict[str, Any]) -> dict[str, str]:
    """The charts by file name."""
    machine, commands = data["machine"], data["commands"]
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}; {data['measured']}"
    speed = [{**f, "kind": "ours", "text": f"{f['median']:.2f}x {f['baseline']}"} for f in data["speed"]]
    recovery = [
        {**f, "kind": "ours" if f["label"] == "Syncline" else "theirs", "text": _seconds(f["median"])}
        for f in data["recovery"]
    ]
    return {
        "speed.svg": _chart(
            "Training throughput of 2 workers, DDP = 1", speed, commands["speed"], where, reference=1.0
        ),
        "recovery.svg": _chart("Time lost per killed worker", recovery, commands["recovery"], where),
    }


def _bench(command: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = command.split()[1:]
        subprocess.run([sys.executable, "-m", "syncline.cli.main", *options, "--out", folder], check=True)
        report: dict[str, Any] = json.loads(Path(folder, "bench.json").read_text())
        return report


def _quartiles(spread: dict[str, Any]) -> dict[str, Any]:
    return {"median": spread["median"], "low": spread["low"], "high": spread["high"], "rounds": spread["count"]}


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _chart(
    title: str, figures: list[dict[str, Any]], command: str, where: str, *, reference: float | None = None
) -> str:
    """Horizontal bars from zero to the median, with the interquartile range as a whisker."""
    height = _TOP + _ROW * len(figures) + 40
    most = max(f["high"] for f in figures)

    def x(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / most, 1)

    rounds = f"{min(f['rounds'] for f in figures)} rounds"
    parts = [
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        f'<text class="small" x="12" y="42">median and interquartile range of {rounds}</text>',
    ]
    for number, figure in enumerate(figures):
        top = _TOP + _ROW * number
        middle = top + _BAR / 2
        parts += [
            f'<text x="{_LEFT - 10}" y="{middle + 4.5}" text-anchor="end">{escape(figure["label"])}</text>',
            f'<rect class="{figure["kind"]}" x="{_LEFT}" y="{top}" width="{x(figure["median"]) - _LEFT:.1f}" '
            f'height="{_BAR}" rx="2"/>',
            f'<line class="line" x1="{x(figure["low"])}" x2="{x(figure["high"])}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{x(figure["high"]) + 8}" y="{middle + 4.5}">{escape(figure["text"])}</text>',
        ]
    bottom = _TOP + _ROW * len(figures)
    if reference is not None:
        parts.append(f'<line class="reference" x1="{x(reference)}" x2="{x(reference)}" y1="{_TOP - 6}" y2="{bottom}"/>')
    parts += [
        f'<text class="small" x="12" y="{bottom + 12}">{escape(command)}</text>',
        f'<text class="small" x="12" y="{bottom + 28}">{escape(where)}</text>',
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{_STYLE}\n</style>\n{body}\n</svg>\n'
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if "measure" in sys.argv[1:]:
        MEASUREMENTS.write_text(json.dumps(measure(quick="--quick" in sys.argv), indent=1) + "\n")
    for name, svg in draw(json.loads(MEASUREMENTS.read_text())).items():
        (FOLDER / name).write_text(svg)


if __name__ == "__main__":
    main()
