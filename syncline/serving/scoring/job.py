"""A scoring job on disk: what is scored, with which model, and which pieces are done.

    OUT/_scoring.json                      what the job is; another job is refused in the same folder
    OUT/part-00000-00000-0000000000.parquet    one finished piece; renamed into place when it is complete
    OUT/_SUCCESS                           written at the end

A job that was killed continues where it was: a piece is done when its file exists. Readers of Parquet folders skip
names that begin with an underscore or a dot. Not here: scoring (`score.py`), and files as such (`places.py`).
"""

from __future__ import annotations

import msgspec

from syncline.errors import ConfigError
from syncline.serving.scoring.pieces import ScoringPiece, pieces_of
from syncline.serving.scoring.places import Place

_JOB, _SUCCESS = "_scoring.json", "_SUCCESS"


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

    def __init__(self, place: Place) -> None:
        self.place = place

    def begin(self, job: ScoringJob) -> list[ScoringPiece]:
        """Create the folder or continue in it; the pieces that are left."""
        there = self.place.names()
        if _JOB not in there:
            if there:
                raise ConfigError(
                    f"The folder {self.place.shown} has other files, such as {min(there)}. Choose a new folder with "
                    "--out.",
                    code="scoring-place", path=self.place.shown, others=sorted(there),
                )  # fmt: skip
            self.place.write(_JOB, msgspec.json.format(msgspec.json.encode(job), indent=1))
        else:
            self._check_same(job)
        self.place.remove_unfinished()
        return [piece for piece in job.pieces() if piece.name not in there]

    def finish(self, job: ScoringJob) -> None:
        self.place.write(_SUCCESS, msgspec.json.encode({"rows": job.rows, "parts": len(job.pieces())}))

    def _check_same(self, job: ScoringJob) -> None:
        try:
            before = msgspec.json.decode(self.place.read(_JOB), type=ScoringJob)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{_JOB} in {self.place.shown} is damaged: {error}. Choose a new folder with --out.",
                code="scoring-place", path=self.place.shown,
            ) from error  # fmt: skip
        changed = [name for name in ScoringJob.__struct_fields__ if getattr(before, name) != getattr(job, name)]
        if changed:
            raise ConfigError(
                f"{self.place.shown} holds the scores of another job: {', '.join(changed)} changed. Choose a new "
                "folder with --out, or delete this one.",
                code="other-scoring", path=self.place.shown, changed=changed,
            )  # fmt: skip
