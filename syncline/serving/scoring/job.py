"""A scoring job on disk: what is scored, with which model, and which pieces are done.

    OUT/_scoring.json                      what the job is; another job is refused in the same folder
    OUT/part-00000-00000-0000000000.parquet    one finished piece; renamed into place when it is complete
    OUT/_SUCCESS                           written at the end

A job that was killed continues where it was: a piece is done when its file exists. Readers of Parquet folders skip
names that begin with an underscore or a dot. Not here: scoring (`score.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from syncline.config.owned_files import replace_file
from syncline.errors import ConfigError
from syncline.serving.scoring.pieces import ScoringPiece, pieces_of

_JOB, _SUCCESS, _LOCK = "_scoring.json", "_SUCCESS", "_lock"
_TEMPORARY = ".tmp"


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file to score."""

    path: str
    size_bytes: int
    group_rows: tuple[int, ...]


class ScoringJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is scored and how; a job continues only if all of this is the same."""

    model_sha256: str
    precision: str
    location: str
    format: str
    features: tuple[str, ...]
    outputs: tuple[str, ...]
    rows_per_piece: int
    files: tuple[InputFile, ...]

    @property
    def rows(self) -> int:
        return sum(sum(file.group_rows) for file in self.files)

    def pieces(self) -> list[ScoringPiece]:
        return list(pieces_of([file.group_rows for file in self.files], self.rows_per_piece))


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, job: ScoringJob) -> list[ScoringPiece]:
        """Create the folder or continue in it; the pieces that are left."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / _JOB
        if not file.exists():
            others = sorted(one.name for one in self.path.iterdir() if one.name != _LOCK)
            if others:
                raise ConfigError(
                    f"The folder {self.path} has other files, such as {others[0]}. Choose a new folder with --out.",
                    code="scoring-place", path=str(self.path), others=others,
                )  # fmt: skip
            replace_file(file, msgspec.json.format(msgspec.json.encode(job), indent=1))
        else:
            self._check_same(job, file)
        for left in self.path.glob(f".part-*{_TEMPORARY}"):
            left.unlink(missing_ok=True)
        return [piece for piece in job.pieces() if not (self.path / piece.name).exists()]

    def finish(self, job: ScoringJob) -> None:
        replace_file(self.path / _SUCCESS, msgspec.json.encode({"rows": job.rows, "parts": len(job.pieces())}))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock ends with the process, however that ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"Another process is scoring into {self.path}. Wait for it, or choose another folder with --out.",
                    code="scoring-in-use", path=str(self.path),
                ) from None  # fmt: skip
            yield

    def _check_same(self, job: ScoringJob, file: Path) -> None:
        try:
            before = msgspec.json.decode(file.read_bytes(), type=ScoringJob)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{file} is damaged: {error}. Choose a new folder with --out.", code="scoring-place", path=str(file)
            ) from error
        changed = [name for name in ScoringJob.__struct_fields__ if getattr(before, name) != getattr(job, name)]
        if changed:
            raise ConfigError(
                f"{self.path} holds the scores of another job: {', '.join(changed)} changed. Choose a new folder with "
                "--out, or delete this one.",
                code="other-scoring", path=str(self.path), changed=changed,
            )  # fmt: skip


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` write a temporary file, and rename it when it is on disk."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{_TEMPORARY}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
