"""What the user asks to serve: files and runs, with their names and roles.

Here: reading `syncline serve A B --name digits --canary 10%`, and copies of files that cannot change while they are
served. Not here: making a file of a run (`exporter.py`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.errors import ConfigError
from syncline.serving.server.catalog import Role

__all__ = ["ModelSource", "read_share", "snapshot", "sources_of"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """One file or run, and what it becomes."""

    what: str
    model: str
    role: Role = "stable"
    share: float = 0.0

    @property
    def is_file(self) -> bool:
        return Path(self.what).is_file()


def sources_of(
    what: Sequence[str], *, name: str | None = None, canary: float | None = None, shadow: bool = False
) -> list[ModelSource]:
    """The sources in order. With one name, the last is the stable version, or the canary or shadow of the first."""
    if not what:
        raise ConfigError("Name a run directory or an ONNX file to serve.", code="nothing-to-serve")
    if canary is not None and shadow:
        raise ConfigError("A version is a canary or a shadow, not both: leave one of them out.", code="two-roles")
    if canary is not None or shadow:
        if len(what) != 2:
            raise ConfigError(
                f"A canary or shadow needs two sources, the stable one first; {len(what)} were given.",
                code="two-sources", sources=list(what),
            )  # fmt: skip
        model = _checked(name or _name_of(what[0]))
        role: Role = "shadow" if shadow else "canary"
        return [
            ModelSource(what=what[0], model=model),
            ModelSource(what=what[1], model=model, role=role, share=canary or 0.0),
        ]
    if name is not None:
        last = len(what) - 1
        return [
            ModelSource(what=one, model=_checked(name), role="stable" if k == last else "pinned")
            for k, one in enumerate(what)
        ]
    found = [ModelSource(what=one, model=_checked(_name_of(one))) for one in what]
    names = [one.model for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"Two sources have the same name: {', '.join(names)}. With --name they become versions of one model.",
            code="same-name", names=names,
        )  # fmt: skip
    return found


def read_share(text: str) -> float:
    """A share of the requests.

    >>> read_share("10%"), read_share("0.1")
    (0.1, 0.1)
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError.for_setting("canary", text, "a share between 0 and 1, such as 10% or 0.1")
    return share


def snapshot(path: Path, folder: Path) -> Path:
    """A copy of a model file, and of the file with its weights if they are apart; the original may change."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.", code="no-model-file", path=str(path))
    folder.mkdir(parents=True)
    for file in (path, path.with_name(path.name + ".data")):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder / path.name


def _name_of(what: str) -> str:
    path = Path(what)
    return re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem if path.suffix == ".onnx" else path.resolve().name)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError.for_setting("name", name, "letters, digits, '-', '_' and '.', at most 100")
    return name
