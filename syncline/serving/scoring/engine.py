"""What answers: ONNX Runtime with an exported file, or torch with the run's own model.

Here: both behind one function, and the choice between them. ONNX Runtime is taken if it is installed, the export is
proved equal, and it is faster on the first rows. Not here: the processes (`processes.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from syncline.errors import ConfigError, ExportError
from syncline.serving.metadata import ModelMetadata, open_session, read_metadata

Runtime = Literal["auto", "torch", "onnx"]
Answer = Callable[[np.ndarray], dict[str, np.ndarray]]

_BATCH = 256
EXPORT_S = 10.0
"""About what an export takes, with its proof. A job that torch finishes in less is not worth it."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process finds the model: an ONNX file, or a run for torch."""

    runtime: Literal["torch", "onnx"]
    path: str
    names: tuple[str, ...]
    checkpoint: int | None = None
    content: bytes = b""
    """Of the ONNX file, for processes on machines that do not have it."""

    def with_content(self) -> Loaded:
        """The same with the file inside, if it is one."""
        if self.runtime == "torch":
            return self
        return msgspec.structs.replace(self, content=Path(self.path).read_bytes())


def answer_of(loaded: Loaded, threads: int) -> Answer:
    """The function from inputs to outputs by name, in this process."""
    run = _onnx(loaded, threads) if loaded.runtime == "onnx" else _torch(loaded, threads)

    def answer(inputs: np.ndarray) -> dict[str, np.ndarray]:
        parts = [run(inputs[start : start + _BATCH]) for start in range(0, len(inputs), _BATCH)]
        return {name: np.concatenate([part[name] for part in parts]) for name in loaded.names}

    return answer


def is_worth_exporting(seconds_per_batch: float, rows: int, processes: int) -> bool:
    """Whether the time of scoring all rows with torch justifies an export.

    >>> is_worth_exporting(0.01, 10_000, 2), is_worth_exporting(0.01, 10_000_000, 2)
    (False, True)
    """
    return seconds_per_batch * rows / _BATCH / processes > 2 * EXPORT_S


def choose(
    source: Path, loaded: Loaded, metadata: ModelMetadata, rows: int, processes: int, path: Path
) -> tuple[Loaded, str]:
    """ONNX Runtime with a file at `path` instead of torch, if that is worth it; and why."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxscript") is None:
        return loaded, "onnxruntime is not installed: pip install 'syncline[serve]'"
    sample = _sample(metadata)
    with threads_kept():
        per_batch = _seconds(answer_of(loaded, 1), sample)
    if not is_worth_exporting(per_batch, rows, processes):
        return loaded, "the job is too short for an export"
    try:
        exported = export_to(source, path, loaded)
    except ExportError as error:
        return loaded, f"the model cannot be exported ({error.code})"
    faster = _seconds(answer_of(exported, 1), sample)
    if faster >= per_batch:
        return loaded, f"torch is faster ({1e3 * per_batch:.3g} against {1e3 * faster:.3g} ms for {_BATCH} rows)"
    return exported, f"{per_batch / faster:.1f} times as fast as torch, and proved equal"


def export_to(source: Path, path: Path, loaded: Loaded) -> Loaded:
    """The same model as an ONNX file; one that a killed job has left is used again if it is of the same weights."""
    from syncline.serving.exporting.onnx_file import export_onnx
    from syncline.serving.trained import trained_model

    trained = trained_model(source, checkpoint=loaded.checkpoint)
    if path.exists():
        left = read_metadata(path)
        if left.sha256 == trained.sha256 and tuple(left.output_names) == loaded.names:
            return msgspec.structs.replace(loaded, runtime="onnx", path=str(path))
    export_onnx(trained, path, outputs=loaded.names, most_samples=1000)
    return msgspec.structs.replace(loaded, runtime="onnx", path=str(path))


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which `answer_of` sets for the whole process."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sample(metadata: ModelMetadata) -> np.ndarray:
    facts = metadata.inputs[0]
    return np.zeros((_BATCH, *facts.shape), facts.dtype)


def _seconds(answer: Answer, inputs: np.ndarray) -> float:
    """The least of three, after one to warm up."""
    answer(inputs)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        answer(inputs)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _onnx(loaded: Loaded, threads: int) -> Answer:
    session = open_session(loaded.path, threads=threads, content=loaded.content or None)
    name = session.get_inputs()[0].name

    def run(inputs: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(loaded.names, session.run(list(loaded.names), {name: inputs}), strict=True))

    return run


def _torch(loaded: Loaded, threads: int) -> Answer:
    import torch

    from syncline.serving.exporting.graph import graph_of
    from syncline.serving.trained import trained_model

    torch.set_num_threads(threads)
    if loaded.checkpoint is not None and not Path(loaded.path).is_dir():
        raise ConfigError(
            f"The machine {socket.gethostname()} has no {loaded.path}, which torch needs. Put the run on a folder that "
            "all machines share, or use --runtime onnx.",
            code="run-not-shared", path=loaded.path, host=socket.gethostname(),
        )  # fmt: skip
    names: Sequence[str] = loaded.names
    graph = graph_of(trained_model(loaded.path, checkpoint=loaded.checkpoint), names)

    def run(inputs: np.ndarray) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            found = graph(torch.from_numpy(inputs))
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    return run
