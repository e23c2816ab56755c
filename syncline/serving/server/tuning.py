"""What is measured when a model is loaded: its threads, its time, and whether requests may run together.

A batch is allowed only if each row of its outputs depends on its own row of the inputs. Models that break this exist
(batch normalization in training mode, a softmax over the batch), so it is tested, not assumed. Not here: forming
batches (`batching.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncline.serving.server.datatypes import DTYPES
from syncline.serving.server.engine import InferenceEngine
from syncline.serving.server.signature import TensorSpec

__all__ = ["Tuned", "probe", "tune"]

_PROBES = 5
_MOST_PROBE_S = 0.2
_EFFICIENCY = 0.75
"""More threads must be used by at least this share: they take the cores of other requests."""
_SHORT_S = 0.001
"""A run below this time stays on one thread: handing work to others costs as much CPU as it saves."""
_TOLERANCE = 1e-3
_ANY_SIZE = 16
"""The size of an unknown dimension other than the batch while measuring."""


@dataclass(frozen=True)
class Tuned:
    """An engine and what was measured of it."""

    engine: InferenceEngine
    threads: int
    run_s: float
    """The time of one sample; 0 if the model could not be measured."""
    batch_s: float
    """The time of a full batch, or of one sample if batches are not allowed."""
    max_batch: int
    """How many rows may run together; 1 if rows would influence one another or the batch is fixed."""
    is_bit_equal: bool
    """Whether a row of a batch had exactly the bits that it has alone."""


def tune(load: Callable[[int], InferenceEngine], cores: int, max_batch: int, threads: int | None = None) -> Tuned:
    """Load the model with the number of threads that is fastest, and measure it."""
    chosen = load(threads or 1)
    count = threads or 1
    alone_s = _time_of(chosen, 1)
    if threads is None and cores > 1 and alone_s > _SHORT_S:
        other = load(cores)
        other_s = _time_of(other, 1)
        if 0 < other_s * cores * _EFFICIENCY <= alone_s:
            chosen, count, alone_s = other, cores, other_s
    allowed, is_bit_equal = probe(chosen, max_batch) if max_batch > 1 else (False, True)
    batch_s = _time_of(chosen, max_batch) if allowed else alone_s
    return Tuned(chosen, count, alone_s, batch_s, max_batch if allowed else 1, is_bit_equal)


def probe(engine: InferenceEngine, rows: int) -> tuple[bool, bool]:
    """Whether rows of a batch are independent of one another, and whether they equal single rows to the bit."""
    if not engine.shares_batch_dimension:
        return False, True
    batch = _sample(engine, rows)
    try:
        together = engine.run(batch)
        alone = [engine.run({name: array[row : row + 1] for name, array in batch.items()}) for row in range(rows)]
    except Exception:  # the model takes other values than ours; without a proof there is no batching
        return False, True
    allowed, is_equal = True, True
    for index, output in enumerate(together):
        if len(output) != rows:
            return False, True
        single = np.concatenate([answer[index] for answer in alone])
        is_equal = is_equal and np.array_equal(output, single)
        allowed = allowed and _is_close(output, single)
    return allowed, is_equal


def _is_close(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype.kind != "f":
        return np.array_equal(left, right)
    scale = max(float(np.abs(right).max(initial=0.0)), 1e-6)
    return bool(np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))


def _time_of(engine: InferenceEngine, rows: int) -> float:
    """The median seconds of a run; 0 if the model does not take our samples."""
    sample = _sample(engine, rows)
    times: list[float] = []
    start = time.perf_counter()
    try:
        engine.run(sample)
        while len(times) < _PROBES and time.perf_counter() - start < _MOST_PROBE_S:
            began = time.perf_counter()
            engine.run(sample)
            times.append(time.perf_counter() - began)
    except Exception:
        return 0.0
    return sorted(times)[len(times) // 2] if times else time.perf_counter() - start


def _sample(engine: InferenceEngine, rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {spec.name: _values(spec, rows, random) for spec in engine.signature.inputs}


def _values(spec: TensorSpec, rows: int, random: np.random.Generator) -> np.ndarray:
    shape = [(rows if axis == 0 else _ANY_SIZE) if size < 0 else size for axis, size in enumerate(spec.shape)]
    dtype: np.dtype[Any] = DTYPES[spec.datatype]
    if spec.datatype == "BYTES":
        return np.full(shape, "", object)
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)  # valid as an index, too
