"""`VersionBuilder`: makes the versions that are served from their sources, and hands them to the rollout.

Here: copies of files, exports of runs, new checkpoints of followed runs, and removing what no version needs any more.
It never waits: the supervisor's loop calls it when an export is done. Not here: the process that exports
(`exporter.py`), the phases of a change (`rollout.py`).
"""

from __future__ import annotations

import selectors
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.errors import SynclineError
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.exporter import Exported, Exporter, ExportFailed
from syncline.serving.server.rollout import Finished, Rollout
from syncline.serving.server.sources import ModelSource, snapshot
from syncline.serving.server.versions import replaced

__all__ = ["VersionBuilder"]


class VersionBuilder:
    """The sources of a server, and the files made of them."""

    def __init__(
        self, sources: Sequence[ModelSource], rollout: Rollout, selector: selectors.BaseSelector,
        say: Callable[[str], None], *, follows: bool,
    ) -> None:  # fmt: skip
        self._sources, self._rollout, self._selector = sources, rollout, selector
        self._say, self._follows = say, follows
        self._folder = tempfile.TemporaryDirectory(prefix="syncline-serve-")
        self._copies = 0
        self._pending: list[str] = []
        self._files: set[str] = set()
        self._exporter: Exporter | None = None

    def build_first(self, run_until: Callable[[Callable[[], bool]], None]) -> None:
        """The first catalog: all sources, or the first error. `run_until` runs the loop until its argument is true."""
        made: dict[int, ServedVersion] = {}
        errors: list[str] = []
        for k, source in enumerate(self._sources):
            self._make(source, lambda new, k=k: made.update({k: new}), errors.append)  # type: ignore[misc]
        run_until(lambda: len(made) == len(self._sources) or bool(errors))
        if errors:
            raise SynclineError(errors[0], code="cannot-serve")
        catalog = self._rollout.catalog
        for _, new in sorted(made.items()):
            catalog = replaced(catalog, None, new, "")
        self._rollout.catalog = catalog
        if self._follows:
            runs = [source.what for source in self._sources if not source.is_file]
            self._exports().follow(runs, Path(self._folder.name))
        self._files = {version.path for version in catalog.versions}

    def reload(self, model: str, finished: Finished) -> None:
        """Read all sources of a model again."""
        sources = [source for source in self._sources if source.model == model]
        errors: list[str] = []
        left = len(sources)

        def one_is_done(error: str | None) -> None:
            nonlocal left
            left -= 1
            errors.extend(filter(None, [error]))
            if not left:
                finished(" ".join(errors) or None)

        for source in sources:
            self._make(source, lambda new, source=source: self._put(source, new, one_is_done), one_is_done)  # type: ignore[misc]

    def forget(self) -> None:
        """In a forked process: close what belongs to the supervisor."""
        if self._exporter is not None:
            self._exporter.forget()

    def close(self) -> None:
        """End the process that exports, and remove all files."""
        if self._exporter is not None:
            self._exporter.close()
        self._folder.cleanup()

    def _make(self, source: ModelSource, made: Callable[[ServedVersion], None], failed: Callable[[str], None]) -> None:
        """A version with a file that never changes: a copy, or the export of a run."""
        self._copies += 1
        folder = Path(self._folder.name) / f"copy-{self._copies}"
        try:
            if source.is_file:
                made(_served(source, snapshot(Path(source.what), folder), None))
                return

            def answered(answer: Exported | ExportFailed) -> None:
                if isinstance(answer, ExportFailed):
                    failed(answer.reason)
                else:
                    if answer.note:
                        self._say(answer.note)
                    made(_served(source, Path(answer.path), answer.step))

            self._exports().ask(source.what, folder, answered)
        except SynclineError as error:
            failed(str(error))

    def _exports(self) -> Exporter:
        if self._exporter is None:
            self._exporter = Exporter(self._on_followed)
            self._selector.register(self._exporter.output, selectors.EVENT_READ, self._on_exports)
        return self._exporter

    def _on_exports(self) -> None:
        assert self._exporter is not None
        if not self._exporter.receive():
            self._selector.unregister(self._exporter.output)
            self._exporter.close()
            self._exporter = None
            if self._follows:
                self._say("The process that exports runs has ended: new checkpoints are not served.")

    def _on_followed(self, answer: Exported | ExportFailed) -> None:
        """The exporter has made a file of a newer checkpoint."""
        if isinstance(answer, ExportFailed):
            self._say(f"The newest checkpoint of {answer.what} is not served: {answer.reason}")
            return

        def finished(error: str | None) -> None:
            shown = f"step {answer.step} of {answer.what}"
            self._say(f"Serving {shown}." if error is None else f"Not serving {shown}: {error}")

        for source in self._sources:
            if source.what == answer.what:
                self._put(source, _served(source, Path(answer.path), answer.step), finished)

    def _put(self, source: ModelSource, new: ServedVersion, finished: Finished) -> None:
        """Serve `new` in place of the version that the same source has made before."""
        self._pending.append(new.path)

        def edit(catalog: Catalog) -> Catalog:
            same = (source.model, source.what, source.role)
            old = next((v for v in catalog.versions if (v.model, v.source, v.role) == same), None)
            return replaced(catalog, old, new, "replaced by a newer version")

        def done(error: str | None) -> None:
            self._pending.remove(new.path)
            self._remove_copies(new.path)
            finished(error)

        self._rollout.change(edit, done)

    def _remove_copies(self, made: str) -> None:
        """Remove the files that no version is made of any more."""
        self._files.add(made)
        used = {version.path for version in self._rollout.catalog.versions}
        for path in self._files - used - set(self._pending):
            self._files.discard(path)
            shutil.rmtree(Path(path).parent, ignore_errors=True)


def _served(source: ModelSource, path: Path, step: int | None) -> ServedVersion:
    return ServedVersion(
        model=source.model, version="0", path=str(path), role=source.role, share=source.share, source=source.what,
        step=step,
    )  # fmt: skip
