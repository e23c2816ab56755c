"""`Hierarchy`: one strategy inside a group of workers, another between the groups. A group is a host.

Here: the type, which pairs are valid, and its text form:

    hierarchy(inside_host=gradients | async | memory | exact, across_hosts=updates | every(steps=5) | everyone | exact)

Which strategies fit where, their methods declare (`fits_inside_group`, `fits_across_groups`). Gradients cross hosts
only if the workers inside have not applied theirs yet, and hosts exchange only when the workers inside agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from syncline.errors import ConfigError
from syncline.strategies import table
from syncline.strategies.answers import Answers, brief, quoted
from syncline.strategies.how import How
from syncline.strategies.method import Method
from syncline.strategies.methods.hierarchical import Hierarchical
from syncline.strategies.methods.local_sgd import LocalSGD
from syncline.strategies.own import Own
from syncline.strategies.strategy import Strategy
from syncline.strategies.table import nearest_answers
from syncline.strategies.what import Updates
from syncline.strategies.when import Every

__all__ = ["Hierarchy", "Level"]

Level = Strategy | Own
"""What a hierarchy is made of."""


@dataclass(frozen=True)
class Hierarchy:
    """The workers of one host synchronize in one way; hosts, each acting as one worker, in another."""

    inside_host: Level
    across_hosts: Level
    group: int = 2
    """How many workers make a group where all workers are on one host."""

    def __post_init__(self) -> None:
        for level in ("inside_host", "across_hosts"):
            if not isinstance(getattr(self, level), Level):
                raise ConfigError(
                    f"hierarchy({level}={getattr(self, level)}): use a strategy of four answers here, such as "
                    "'updates | every(10)', or one of your own; hierarchies and switches do not nest.",
                    code="nested-hierarchy", level=level,
                )  # fmt: skip
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 2:
            raise ConfigError(
                f"hierarchy(group={self.group!r}): a group must have 2 workers or more. "
                f"Use {quoted(_text(self.across_hosts))} alone, or group=2.",
                code="invalid-setting", setting="group", value=self.group,
            )  # fmt: skip
        problem = _problem(self.inside_host, self.across_hosts)
        if problem is None:
            return
        because, inside, across = problem
        while (more := _problem(inside, across)) is not None:
            _, inside, across = more
        group = f", group={self.group}" if self.group != 2 else ""
        instead = f"hierarchy(inside_host={_text(inside)}, across_hosts={_text(across)}{group})"
        raise ConfigError(f"{because} Use {quoted(instead)}.", code="invalid-hierarchy", instead=instead)

    @property
    def method(self) -> Hierarchical:
        return Hierarchical(self.inside_host.method, self.across_hosts.method, self.group)

    @property
    def levels(self) -> dict[str, Level]:
        """For tables: the strategies it is made of, by where they apply."""
        return {"inside a host": self.inside_host, "across hosts": self.across_hosts}

    def encoded(self, how: How) -> Hierarchy:
        """The same strategy with another encoding between hosts, where bytes are scarce."""
        return replace(self, across_hosts=self.across_hosts.encoded(how))

    def __str__(self) -> str:
        group = f", group={self.group}" if self.group != 2 else ""
        return f"hierarchy(inside_host={self.inside_host}, across_hosts={self.across_hosts}{group})"


def _problem(inside: Level, across: Level) -> tuple[str, Level, Level] | None:
    """Why two strategies make no hierarchy, and two that are nearer to one."""
    within, between = inside.method, across.method
    if not within.fits_inside_group:
        because = f"{within.title} does not work inside a host, where the workers act as one and must agree."
        return because, _nearest(inside, within, "fits_inside_group"), across
    if not between.fits_across_groups:
        because = (
            f"{between.title} does not work across hosts: each host acts as one worker, and hosts share no memory, no "
            "server and no model to compete with."
        )
        return because, inside, _nearest(across, between, "fits_across_groups")
    steps = within.steps
    if between.is_lock_step and not within.is_lock_step:
        because = "No gradients are left to sum across hosts: the workers inside have applied theirs."
        answers = _answers(across, because)._replace(what=Updates(), when=Every(steps if steps > 1 else 10))
        return because, inside, Strategy(**nearest_answers(answers, [LocalSGD])._asdict())
    if between.steps % steps:
        rounded = -(-between.steps // steps) * steps
        because = (
            f"Hosts exchange every {between.steps} steps, but the workers inside agree only every {steps}: the number "
            "across must be a multiple of the one inside."
        )
        return because, inside, Strategy(**_answers(across, because)._replace(when=Every(rounded))._asdict())
    return None


def _nearest(level: Level, method: Method, fits: str) -> Strategy:
    because = f"{type(method).__name__} does not declare {fits} = True, which a hierarchy needs there."
    among = [kind for kind in table.METHODS if getattr(kind, fits)]
    return Strategy(**nearest_answers(_answers(level, because), among)._asdict())


def _answers(level: Level, because: str) -> Answers:
    if level.answers is None:  # there is nothing to suggest in place of a user's own strategy
        raise ConfigError(f"{level}: {because}", code="own-does-not-fit", strategy=str(level))
    return level.answers


def _text(level: Level) -> str:
    return str(level) if level.answers is None else brief(level.answers)
