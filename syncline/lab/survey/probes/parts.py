"""Table 1: `parts.py` of an adapter imports the framework and prints the names of its parts by kind."""

from __future__ import annotations

from syncline.errors import SynclineError
from syncline.lab.bench.processes import output_of
from syncline.lab.survey.catalog import PART_KINDS
from syncline.lab.survey.frameworks import variables_for
from syncline.lab.survey.probes.probe import Bench, Round, last_event
from syncline.lab.survey.values import Absent


def count_parts(bench: Bench) -> Round:
    """A kind that `parts.py` leaves out is one that the framework does not have as such."""
    script = bench.peer.folder / "parts.py"
    if not script.is_file():
        return Round(
            values=dict.fromkeys(PART_KINDS, Absent("its adapter has no parts.py, which counts them")), version=""
        )
    output = output_of(
        [str(bench.python), str(script)],
        environment=variables_for(bench.peer, bench.python),
        folder=bench.scratch,
        timeout_s=bench.limit_s,
    )
    event = last_event(output, "parts", "version", "parts")
    return Round(values={kind: _count(event["parts"].get(kind)) for kind in PART_KINDS}, version=str(event["version"]))


def _count(names: object) -> float | Absent:
    if names is None:
        return Absent("the framework has no place of its own for them")
    if not isinstance(names, list) or len(set(names)) != len(names):
        raise SynclineError(f"parts.py has to print a list of different names for each kind, not {names!r}.")
    return float(len(names))
