"""What the surveys asked, as data: `CATALOG`.

An entry has its question, how it is answered here, the columns of its table, and where the question comes from. Here:
the entries that are measured; what is not measured has no entry. Not here: measuring (`probes/`, by the name of the
entry's probe), drawing (`page.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from syncline.errors import UnknownName
from syncline.lab.survey.values import Absent, Quoted

_USABILITY = (
    "Liu, Dutta, Li, Kurup, Shah: Usability Study of Distributed Deep Learning Frameworks For Convolutional Neural "
    "Networks (KDD 2018)"
)
_NOT_AT_HAND = Absent("its figures are not part of this package, read them in the paper")
_WORKLOAD = "LeNet-5 (61,706 parameters) on random images of MNIST's shape, two workers, one thread each"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of an entry's table."""

    key: str
    title: str
    unit: str = ""
    better: Literal["more", "less"] | None = None
    """Which values are better; None if the column claims no ranking."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One question of a survey."""

    id: str
    title: str
    question: str
    how: str
    """How the cells are measured: what runs, what counts, what is left out."""
    source: str
    """The survey that asked."""
    printed: Quoted | Absent
    """What that survey printed."""
    columns: tuple[Column, ...]
    probe: str
    drawing: Literal["table", "bars"]
    rounds: int
    quick_rounds: int

    def wanted_rounds(self, *, is_quick: bool) -> int:
        return self.quick_rounds if is_quick else self.rounds

    def column(self, key: str) -> Column | None:
        return next((c for c in self.columns if c.key == key), None)


PART_KINDS = ("activations", "metrics", "initializers", "losses", "layers", "optimizers", "regularizers")
BATCHES = (16, 64, 256)


def _by_batch(unit: str, better: Literal["more", "less"]) -> tuple[Column, ...]:
    return tuple(Column(key=f"batch-{b}", title=f"batch {b}", unit=unit, better=better) for b in BATCHES)


CATALOG = (
    Entry(
        id="table-1",
        title="Parts that a framework brings",
        question="How many activations, metrics, initializers, losses, layers, optimizers and regularizers are there?",
        how="The installed package is imported in its own environment and counted by parts.py of its adapter. A part "
        "is a public class or function under its documented home; aliases of one object count once, abstract base "
        "classes do not count.",
        source=_USABILITY,
        printed=_NOT_AT_HAND,
        columns=tuple(Column(key=kind, title=kind) for kind in PART_KINDS),
        probe="parts",
        drawing="table",
        rounds=1,
        quick_rounds=1,
    ),
    Entry(
        id="table-4",
        title="Effort to get started",
        question="What does it take from nothing to a first distributed training?",
        how="Commands: those that create the environment; 0 if it runs in Syncline's own. Disk: that environment. "
        "Lines: code lines of the adapter without blank lines, comments and docstrings; added and removed against "
        "the same training in one process, only for adapters that train torch modules in a loop. Command: seconds "
        f"from the command to its exit, with 50 + 100 steps of {_WORKLOAD}, batch 64.",
        source=_USABILITY,
        printed=_NOT_AT_HAND,
        columns=(
            Column(key="commands", title="commands to install"),
            Column(key="disk", title="disk", unit="MB"),
            Column(key="lines", title="code lines"),
            Column(key="added", title="lines added"),
            Column(key="removed", title="lines removed"),
            Column(key="command", title="command to exit", unit="s", better="less"),
        ),
        probe="effort",
        drawing="table",
        rounds=3,
        quick_rounds=2,
    ),
    Entry(
        id="figure-2",
        title="Memory by batch size",
        question="How much memory does training take, by batch size?",
        how=f"Peak of the proportional set size (PSS) of all processes that the command started, sampled five times a "
        f"second, in {_WORKLOAD}. Launchers and schedulers count: they take memory, too.",
        source=_USABILITY,
        printed=_NOT_AT_HAND,
        columns=_by_batch("MB", "less"),
        probe="memory",
        drawing="bars",
        rounds=3,
        quick_rounds=2,
    ),
    Entry(
        id="figure-4",
        title="Training speed by batch size",
        question="How many images per second are trained, by batch size?",
        how=f"{_WORKLOAD}, SGD with momentum. 50 warm-up steps are excluded; 600, 300 and 150 steps (a quick "
        "survey: half of them) are timed inside of the training process, so start-up does not count.",
        source=_USABILITY,
        printed=_NOT_AT_HAND,
        columns=_by_batch("images/s", "more"),
        probe="speed",
        drawing="bars",
        rounds=5,
        quick_rounds=2,
    ),
    Entry(
        id="kill-test",
        title="Fault tolerance",
        question="What happens if a worker is killed in the middle of training?",
        how=f"kill -9 of the youngest busy worker process during {_WORKLOAD}, batch 64. It holds if the same command "
        "then completes all its steps and exits with 0.",
        source="Overviews of distributed deep learning: the column 'fault tolerance' of their comparison tables",
        printed=Absent("a word per system, not the outcome of a test"),
        columns=(
            Column(key="survives", title="completes after kill -9"),
            Column(key="after", title="exit after the kill", unit="s"),
        ),
        probe="kill",
        drawing="table",
        rounds=2,
        quick_rounds=1,
    ),
)


def entries_named(ids: Iterable[str]) -> tuple[Entry, ...]:
    """The entries with these ids, in the catalog's order; all of them if none is given."""
    known = {entry.id: entry for entry in CATALOG}
    wanted = set(ids)
    for name in sorted(wanted):
        if name not in known:
            raise UnknownName.among("survey entry", name, known)
    return tuple(entry for entry in CATALOG if not wanted or entry.id in wanted)
