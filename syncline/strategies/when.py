"""The second question: when is it exchanged? Answers as data."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import ConfigError

__all__ = ["Every", "When"]


@dataclass(frozen=True)
class Every:
    """All together, every so many steps."""

    steps: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"Every({self.steps!r}): the number of steps between exchanges must be 1 or more.")


When = Every
