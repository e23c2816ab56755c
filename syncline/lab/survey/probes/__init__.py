"""How entries are measured, by name: `PROBES`. One file per subject."""

from __future__ import annotations

from syncline.lab.survey.probes.effort import measure_effort
from syncline.lab.survey.probes.kill import measure_kill
from syncline.lab.survey.probes.parts import count_parts
from syncline.lab.survey.probes.probe import Probe
from syncline.lab.survey.probes.training import measure_memory, measure_speed

PROBES: dict[str, Probe] = {
    "parts": count_parts,
    "effort": measure_effort,
    "memory": measure_memory,
    "speed": measure_speed,
    "kill": measure_kill,
}
