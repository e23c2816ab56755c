"""The proof of an export: the exported model and the torch model on the same samples.

Here: `prove`, and the scores of both on the test data. The torch model gets the samples as the run's own evaluation
does; the exported one gets them as stored. So a mistake in scaling, in the order of classes or in an operator shows.
Not here: how an exported model is run (its own format's module).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from syncline.errors import ExportError
from syncline.models.answers import PROBABILITIES, Answers, main_name
from syncline.models.named_outputs import NamedOutputs
from syncline.serving.exporting.graph import random_inputs
from syncline.serving.samples import RawSamples
from syncline.serving.trained import TrainedModel

Run = Callable[[tuple[np.ndarray, ...]], dict[str, np.ndarray]]
"""An exported model: from inputs as stored to outputs by name."""

TOLERANCE = 1e-4
"""The largest difference allowed, as a fraction of the largest value of the same output. Sums of float32 in another
order differ by about 1e-6 of it in a network of a few layers and 1e-5 in one of fifty."""
MOST_SAMPLES = 10_000
_BATCH = 128
_RANDOM_SAMPLES = 64


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and the result.

    Attributes:
        data: The samples were taken from the test data, the training data, or a random generator.
        samples: How many were compared.
        available: How many there are.
        tolerance: The largest difference allowed; None if only scores count, as for int8.
        differences: The largest difference of each output, as a fraction of its largest value.
        measure: Of the scores: `accuracy` or `R2`; None without targets.
        torch_score: Of the torch model, from 0 to 1.
        exported_score: Of the exported model.
        agreement: The fraction of samples with the same class in both, for a classifier.
    """

    data: Literal["test", "train", "random"]
    samples: int
    available: int
    tolerance: float | None
    differences: dict[str, float]
    measure: Literal["accuracy", "R2"] | None = None
    torch_score: float | None = None
    exported_score: float | None = None
    agreement: float | None = None

    @property
    def drop_points(self) -> float | None:
        """By how many percentage points the exported model scores worse."""
        if self.torch_score is None or self.exported_score is None:
            return None
        return 100 * (self.torch_score - self.exported_score)


def prove(
    model: TrainedModel,
    names: Sequence[str],
    run: Run,
    *,
    tolerance: float | None = TOLERANCE,
    most: int = MOST_SAMPLES,
) -> Proof:
    """Compare an exported model with its torch model; `ExportError` if an output differs by more than `tolerance`."""
    reference = NamedOutputs(model.module, model.answers, names).eval()
    data, samples = _data_of(model)
    available = len(samples) if samples is not None else _RANDOM_SAMPLES
    differences = {name: _Difference() for name in names}
    scored = _scored_name(model.answers, names)
    ours, theirs, same = _Score(model.answers), _Score(model.answers), _Agreement()
    with torch.inference_mode():
        for raw, prepared, target in _batches(model, samples, min(available, most)):
            expected = {name: value.numpy() for name, value in reference(*prepared).items()}
            found = run(raw)
            for name in names:
                differences[name].add(expected[name], found[name])
            if scored is not None and target is not None:
                ours.add(expected[scored], target.numpy())
                theirs.add(found[scored], target.numpy())
            if scored is not None and model.answers == "classes":
                same.add(expected[scored], found[scored])
    relative = {name: difference.relative for name, difference in differences.items()}
    _check(relative, tolerance, min(available, most), data)
    return Proof(
        data=data,
        samples=min(available, most),
        available=available,
        tolerance=tolerance,
        differences=relative,
        measure=ours.measure if ours.value is not None else None,
        torch_score=ours.value,
        exported_score=theirs.value,
        agreement=same.value,
    )


def _data_of(model: TrainedModel) -> tuple[Literal["test", "train", "random"], RawSamples | None]:
    if model.test is not None:
        return "test", model.test
    return ("train", model.train) if model.train is not None else ("random", None)


def _batches(
    model: TrainedModel, samples: RawSamples | None, count: int
) -> Iterator[tuple[tuple[np.ndarray, ...], tuple[torch.Tensor, ...], torch.Tensor | None]]:
    """Inputs as stored, inputs for torch, and the target. The first batch is a single sample."""
    if samples is None:
        raw = random_inputs(model, count)
        tensors = tuple(torch.from_numpy(value) for value in raw)
        yield raw, (model.preparation(tensors[0]), *tensors[1:]), None
        return
    # Evenly spaced: sorted data would otherwise show some of the classes only.
    chosen = np.linspace(0, len(samples) - 1, count).round().astype(np.int64)
    edges = [0, 1, *range(1 + _BATCH, count, _BATCH), count] if count > 1 else [0, 1]
    for low, high in itertools.pairwise(edges):
        some = chosen[low:high]
        inputs, target = samples.prepared(some)
        yield samples.raw(some), inputs, target


def _check(relative: dict[str, float], tolerance: float | None, samples: int, data: str) -> None:
    worst = max(relative, key=lambda name: (np.isnan(relative[name]), relative[name]))
    if tolerance is None or relative[worst] <= tolerance:
        return
    raise ExportError(
        f"The exported model is not equal to the run's: its output {worst!r} differs by {relative[worst]:.2g} of the "
        f"largest value on {samples:,} samples of the {data} data, and {tolerance:g} is allowed. Nothing was written. "
        "If the model draws random numbers in evaluation mode, make it deterministic; otherwise export it with "
        "--format torch, and report this.",
        code="not-equal", output=worst, difference=relative[worst], tolerance=tolerance, samples=samples, data=data,
    )  # fmt: skip


def _scored_name(answers: Answers, names: Sequence[str]) -> str | None:
    """The output that a score is computed from."""
    return next((name for name in (main_name(answers), PROBABILITIES) if name in names), None)


class _Difference:
    """The largest difference of one output so far, and its largest value."""

    def __init__(self) -> None:
        self._largest = self._value = 0.0

    def add(self, expected: np.ndarray, found: np.ndarray) -> None:
        if expected.shape != found.shape:
            self._largest = float("inf")
            return
        both_nan = np.isnan(expected) & np.isnan(found)
        same = both_nan | (expected == found)  # infinities included
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0.0, np.abs(expected.astype(np.float64) - found))
        self._largest = float(np.max(np.append(apart, self._largest)))  # keeps a NaN
        finite = np.abs(expected[np.isfinite(expected)])
        self._value = max(self._value, float(finite.max()) if finite.size else 0.0)

    @property
    def relative(self) -> float:
        return self._largest / self._value if self._value else self._largest


class _Agreement:
    """How often two classifiers choose the same class."""

    def __init__(self) -> None:
        self._same = self._count = 0

    def add(self, one: np.ndarray, other: np.ndarray) -> None:
        if one.ndim >= 2 and one.shape == other.shape:
            same = one.argmax(1) == other.argmax(1)
            self._same, self._count = self._same + int(same.sum()), self._count + same.size

    @property
    def value(self) -> float | None:
        return self._same / self._count if self._count else None


class _Score:
    """Accuracy for classes, else the coefficient of determination, R2 = 1 - sum (t - y)^2 / sum (t - mean t)^2."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.measure: Literal["accuracy", "R2"] = "R2" if answers in ("number", "numbers") else "accuracy"
        self._count, self._hits, self._errors, self._sum, self._squares = 0, 0, 0.0, 0.0, 0.0

    def add(self, output: np.ndarray, target: np.ndarray) -> None:
        if self.measure == "R2":
            if output.size == target.size:
                wanted = target.astype(np.float64).reshape(-1)
                self._count += wanted.size
                self._errors += float(((output.reshape(-1) - wanted) ** 2).sum())
                self._sum += float(wanted.sum())
                self._squares += float((wanted**2).sum())
            return
        chosen = self._chosen(output)
        if chosen.shape == target.shape or chosen.size == target.size:
            self._hits += int((chosen.reshape(-1) == target.reshape(-1)).sum())
            self._count += chosen.size

    def _chosen(self, output: np.ndarray) -> np.ndarray:
        if self._answers == "classes":
            return np.asarray(output.argmax(1))
        return (output > (0.0 if self._answers == "binary logits" else 0.5)).astype(np.int64)

    @property
    def value(self) -> float | None:
        if not self._count:
            return None
        if self.measure == "accuracy":
            return self._hits / self._count
        spread = self._squares - self._sum**2 / self._count
        return 1 - self._errors / spread if spread > 0 else None
