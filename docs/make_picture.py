"""Make the picture of the terminal in the README: train for real, then draw what the live view showed on the way.

make picture
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

import syncline
from syncline.observe.state import RunState
from syncline.observe.terminal.result import result_panel
from syncline.observe.terminal.screen import draw
from syncline.telemetry.events import Event, Summary
from syncline.telemetry.run_dir import RunDir

WIDTH = 100
PICTURES = Path(__file__).parent / "pictures"


def events_of_a_real_run() -> list[Event]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        result = syncline.train(model="lenet", data="mnist", workers=2, epochs=3, name="lenet-mnist", quiet=True)
        return list(RunDir(result.run_dir).read_events())


def picture(console: Console, name: str, title: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    drawn = console.export_svg(title=title)
    # Rich names fonts on a server; a picture in a repository should need nothing from outside.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.S)
    (PICTURES / f"{name}.svg").write_text(drawn.replace("Fira Code", "DejaVu Sans Mono"))


def new_console() -> Console:
    return Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")


def main() -> None:
    events = events_of_a_real_run()
    command = "syncline train lenet --data mnist --workers 2 --epochs 3"
    state = RunState()
    on_the_way = new_console()
    for number, event in enumerate(events):
        state.apply(event)
        if number == int(0.7 * len(events)):
            on_the_way.print(draw(state, width=WIDTH, height=30))
        if isinstance(event, Summary):
            at_the_end = new_console()
            at_the_end.print(result_panel(state, event, WIDTH))
            picture(at_the_end, "result", command)
    picture(on_the_way, "training", command)


if __name__ == "__main__":
    main()
