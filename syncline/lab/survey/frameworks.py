"""The rows of the survey: frameworks by their adapters, those of `benchmarks/peers` and those that were added.

Here: finding them, and the digest of an adapter. Not here: environments (`bench/peer_recipes.py`), checking a new
adapter (`adding.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from syncline.errors import UnknownName
from syncline.lab.bench.peer_recipes import PeerFramework, adapters_folder, all_peers, environment_of
from syncline.lab.survey.survey_file import Adapter, digest_of_files

_SHORT = {"syncline": "syncline-train"}
_ADDED = "adapters"


def added_folder(environments: Path) -> Path:
    """Where `syncline survey add` puts adapters: beside the environments."""
    return environments / _ADDED


def protocol_folder() -> Path:
    return adapters_folder() / "protocol"


def frameworks(environments: Path) -> dict[str, PeerFramework]:
    """All of them by key: Syncline first, then those that need no installation, then by name."""
    found = [*all_peers(adapters_folder()), *all_peers(added_folder(environments))]
    found.sort(key=lambda p: (p.key != "syncline-train", p.has_own_environment, p.name.lower()))
    return {p.key: p for p in found}


def frameworks_named(keys: Iterable[str], environments: Path) -> list[PeerFramework]:
    """Those with these keys, in order; all of them if none is given. `syncline` stands for `syncline-train`."""
    known = frameworks(environments)
    wanted = {_SHORT.get(key, key) for key in keys}
    for key in sorted(wanted):
        if key not in known:
            raise UnknownName.among("framework", key, [*known, *_SHORT])
    return [peer for key, peer in known.items() if not wanted or key in wanted]


def facts_of(peer: PeerFramework) -> Adapter:
    return Adapter(name=peer.name, what=peer.what, digest=digest_of_files(peer.folder, protocol_folder()))


def variables_for(peer: PeerFramework, python: Path) -> dict[str, str]:
    """Those of a bench of peers; an added adapter finds the shared protocol, too."""
    variables = environment_of(peer, python)
    return {**variables, "PYTHONPATH": os.pathsep.join([str(protocol_folder()), variables["PYTHONPATH"]])}
