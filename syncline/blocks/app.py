"""What an app of `syncline.fit` declares. An app is one file in `apps/`, and one line in `apps/__init__.py`.

Here: the base class, whose defaults suit most apps. The parameters are divided into `count` blocks. In each round every
lane computes an `update` of its blocks from the same state, and all workers `merge` the updates of all lanes into their
copies of the state. A `survey` looks at everything, a part per lane, to `judge` how far the fit is. All of these must
be deterministic: a lane of a worker that was killed is computed again by another one, and must find the same.

Not here: which blocks are next (`schedule.py`), running the rounds (`loop.py`), reading files (`reading.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from syncline.blocks.schedule import By, Related, pick
from syncline.errors import ConfigError, check_options

Arrays = dict[str, np.ndarray]
Kind = Literal["table", "ratings", "corpus"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a survey says about a fit."""

    objective: float
    """What is minimized."""
    gap: float
    """How far the fit is from done, relative: it ends when this is at most the tolerance."""
    change: np.ndarray | None = None
    """How much each block would change, if the survey knows."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Shown to the user."""


@dataclass(frozen=True)
class Round:
    """The circumstances of a round."""

    number: int
    lanes: int
    seed: int

    def random(self, lane: int) -> np.random.Generator:
        """Random numbers that depend on nothing else."""
        return np.random.default_rng((self.seed, self.number, lane))


@dataclass(frozen=True, kw_only=True)
class App:
    """The model that is fitted, with its options as fields."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for --help."""
    data: ClassVar[Kind]
    orders: ClassVar[tuple[By, ...]] = ("cyclic",)
    """The possible orders of blocks; the first is the default."""
    tolerance: ClassVar[float] = 1e-4
    max_rounds: ClassVar[int] = 10_000

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options with their defaults."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    @classmethod
    def make(cls, given: Mapping[str, Any]) -> Self:
        """The app with the options that a user gave."""
        check_options(cls.name, given, cls.options())
        return cls(**given)

    def prepare(self, data: Any) -> Arrays:
        """Check the data and bring it into the form that the fit needs; `DataError` says what is wrong with it."""
        raise NotImplementedError

    def count(self, problem: Arrays) -> int:
        """The number of blocks."""
        raise NotImplementedError

    def size(self, problem: Arrays, lanes: int) -> int:
        """How many blocks a lane updates in a round, unless the user says so."""
        return -(-self.count(problem) // lanes)

    def start(self, problem: Arrays, seed: int, warm: Arrays | None) -> Arrays:
        """The state before the first round; `warm` is the result of an earlier fit."""
        raise NotImplementedError

    def pick(
        self, problem: Arrays, state: Arrays, change: np.ndarray, *, by: By, size: int, related: Related, at: Round
    ) -> list[np.ndarray]:
        """The blocks of each lane."""
        del problem, state
        return pick(change, by=by, lanes=at.lanes, size=size, related=related, seed=at.seed, number=at.number)

    def related(self, problem: Arrays, blocks: np.ndarray, others: np.ndarray, apart: float) -> np.ndarray | None:
        """Which of these blocks (rows) depend on which of the others by more than `apart`; None if none ever do."""
        del problem, blocks, others, apart
        return None

    def is_crowded(self, state: Arrays) -> bool:
        """Whether lanes have got in each other's way, so that relations are to be checked unless the user says so."""
        del state
        return True

    def update(self, problem: Arrays, state: Arrays, blocks: np.ndarray, at: Round, lane: int) -> Arrays:
        """What a lane finds for its blocks, one after the other. Does not change the state."""
        raise NotImplementedError

    def merge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays], lanes: Sequence[np.ndarray]) -> np.ndarray:
        """Change the state by what all lanes found. How much each block changed, in the order of the lanes."""
        raise NotImplementedError

    def survey_due(self, change: np.ndarray, peak: float, rounds: int, rounds_of_a_pass: int) -> bool:
        """Whether it is time for a survey: `rounds` after the last one, when the largest change was `peak`."""
        del change, peak
        return rounds >= rounds_of_a_pass

    def survey(self, problem: Arrays, state: Arrays, lane: int, lanes: int) -> Arrays:
        """This lane's part of a look at everything."""
        raise NotImplementedError

    def judge(self, problem: Arrays, state: Arrays, found: Sequence[Arrays]) -> Verdict:
        """How far the fit is, from the parts of all lanes; may write to the state."""
        raise NotImplementedError

    def result(self, problem: Arrays, state: Arrays) -> Arrays:
        """What the user gets."""
        raise NotImplementedError

    def predict(self, result: Arrays, data: Any) -> np.ndarray:
        """What the model says about new data, from its result."""
        del result, data
        raise ConfigError(f"{self.name} does not predict. Use the arrays in `values`.", code="no-prediction")

    def describe(self, result: Arrays, names: Sequence[str]) -> list[str]:
        """The result in a few lines, for the terminal; `names` are those of columns, items or words."""
        del result, names
        return []


def check_number(
    app: str, option: str, value: object, *, least: float, most: float = np.inf, above: bool = False
) -> None:
    """`ConfigError` unless the option is a number from `least` to `most`, or greater than `least`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_enough = least < value if above else least <= value
        if is_enough and value <= most and value < np.inf:
            return
    bounds = f"greater than {least:g}" if above else f"{least:g} or more"
    if most < np.inf:
        bounds += f", and at most {most:g}"
    raise ConfigError(
        f"The option {option} of {app} is {value!r}, but must be a number {bounds}.",
        code="invalid-setting", setting=option, value=value,
    )  # fmt: skip


def check_count(app: str, option: str, value: object, least: int = 1) -> None:
    """`ConfigError` unless the option is an integer of `least` or more."""
    if type(value) is not int or value < least:
        raise ConfigError(
            f"The option {option} of {app} is {value!r}, but must be an integer of {least} or more.",
            code="invalid-setting", setting=option, value=value,
        )  # fmt: skip


def share(count: int, lane: int, lanes: int) -> slice:
    """A lane's part of a range."""
    return slice(count * lane // lanes, count * (lane + 1) // lanes)


def start_from(app: str, warm: Arrays, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array `name` of an earlier result; `ConfigError` unless it has this shape."""
    if name not in warm or warm[name].shape != shape:
        found = f"has {name} of shape {warm[name].shape}" if name in warm else f"has no {name}, but {', '.join(warm)}"
        raise ConfigError(
            f"The result to start {app} from {found}. These data and options need {name} of shape {shape}: start from "
            "a result of the same model on data like these.", code="another-start", name=name, shape=shape,
        )  # fmt: skip
    return warm[name]
