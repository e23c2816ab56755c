"""Syncline's parts, by the names that a declared model, a run file and the command line take."""

from peer_protocol import PART_KINDS, print_event

import syncline
from syncline.cli.kinds import everything

print_event(event="parts", version=syncline.__version__, parts={kind: sorted(everything(kind)) for kind in PART_KINDS})
