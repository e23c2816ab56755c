"""`survey.json`: the cells, the machines and adapters behind them, and checksums.

A checksum shows accidental and careless changes: each cell has one, and so has the whole file. It is no signature; who
computes all of them again is found by what `verify.py` can compare with the catalog and the adapters. Here: reading and
writing. Not here: measuring (`measuring.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import ConfigError
from syncline.lab.survey.catalog import Entry
from syncline.lab.survey.values import Value
from syncline.telemetry.run_dir import RunDir

FORMAT = 1
NAME = "survey.json"

Place = tuple[str, str, str, str]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine and how it measured; its id is the checksum of its lasting facts."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    syncline: str

    @property
    def id(self) -> str:
        return _digest(self)[:12]


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a machine measured: the date, whether it was a quick look, and the load before it began."""

    date: str
    is_quick: bool
    load_at_start: float


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapter of a framework as it was used."""

    name: str
    what: str
    digest: str
    """Of all its files, and of the shared protocol."""


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a table."""

    entry: str
    framework: str
    column: str
    machine: str
    value: Value
    version: str
    """The framework's, as it says itself; empty if it did not run."""
    adapter: str
    """The digest of the adapter that measured it."""
    checksum: str = ""

    @property
    def place(self) -> Place:
        return (self.machine, self.entry, self.framework, self.column)

    def sealed(self) -> Cell:
        bare = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=_digest(bare))

    @property
    def is_intact(self) -> bool:
        return self == self.sealed()


class SurveyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that was measured."""

    machines: dict[str, Machine]
    sessions: dict[str, Session]
    """By the machine's id."""
    adapters: dict[str, Adapter]
    """By the framework's key. All cells of a framework were measured by one adapter."""
    entries: dict[str, str]
    """The digest of each entry as it was asked."""
    cells: tuple[Cell, ...]
    format: int = FORMAT
    checksum: str = ""

    def sealed(self) -> SurveyFile:
        bare = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=_digest(bare))

    @property
    def is_intact(self) -> bool:
        return self.checksum == self.sealed().checksum


def digest_of_entry(entry: Entry) -> str:
    return _digest(asdict(entry))


def digest_of_files(*folders: Path) -> str:
    """Of the names and contents of all files in these folders, except what Python leaves there."""
    digest = hashlib.sha256()
    for number, folder in enumerate(folders):
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            content = path.read_bytes()
            digest.update(f"{number}/{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def as_json(survey: SurveyFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(survey.sealed()), indent=1) + b"\n"


def write(survey: SurveyFile, path: Path) -> None:
    """Replace the file atomically, sealed."""
    RunDir.write(path, as_json(survey))


def parse(data: bytes, name: str) -> SurveyFile:
    """The file's content; `ConfigError` if it is no survey. Checksums are `verify.py`'s."""
    try:
        survey = msgspec.json.decode(data, type=SurveyFile)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{name} is not a survey: {error}. Give the survey.json that 'syncline survey' wrote.", code="not-a-survey"
        ) from error
    if survey.format != FORMAT:
        raise ConfigError(
            f"{name} has format {survey.format}, but this Syncline reads format {FORMAT}. Measure it again, or read "
            "it with the version of Syncline that it names.",
            code="not-a-survey",
        )
    return survey


def read(path: Path) -> SurveyFile:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}. Give the path of a survey.json.") from error
    return parse(data, str(path))


def _digest(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
