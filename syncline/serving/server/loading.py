"""Loading the versions of a catalog, on a thread, while the process keeps answering."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from syncline.serving.server.batching import Batcher
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.engine import TORCH_SUFFIX, load_engine
from syncline.serving.server.registry import LoadedVersion
from syncline.serving.server.tuning import Tuned, tune

__all__ = ["Loader"]


class Loader:
    """Loads versions; remembers those that are loaded but not served yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, cores: int, max_batch: int, wait_s: float) -> None:
        self._loop, self._cores, self._max_batch, self._wait_s = loop, cores, max_batch, wait_s
        self._threads = ThreadPoolExecutor(1, "syncline-run")
        self._loads = ThreadPoolExecutor(1, "syncline-load")
        self._known_threads: dict[str, int] = {}

    async def load(
        self, catalog: Catalog, have: Mapping[tuple[str, str], LoadedVersion]
    ) -> dict[tuple[str, str], LoadedVersion]:
        """All versions of the catalog: those that are there, and new ones."""
        found: dict[tuple[str, str], LoadedVersion] = {}
        for served in catalog.versions:
            found[served.key] = have.get(served.key) or await self._load(served)
        return found

    async def _load(self, served: ServedVersion) -> LoadedVersion:
        tuned = await self._loop.run_in_executor(self._loads, self._tuned, served)
        # A new version of a model is as large as the last one: measure its threads once.
        self._known_threads[served.model] = tuned.threads
        batcher = Batcher(tuned, self._loop, self._threads)
        batcher.longest_wait_s = self._wait_s
        return LoadedVersion(served, tuned, batcher)

    def _tuned(self, served: ServedVersion) -> Tuned:
        path, known = Path(served.path), self._known_threads.get(served.model)
        cores = 1 if path.suffix == TORCH_SUFFIX else self._cores
        return tune(lambda threads: load_engine(path, threads), cores, self._max_batch, known)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._loads.shutdown(wait=False)
