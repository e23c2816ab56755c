"""The order in which contenders are measured, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from syncline.lab.bench.harness import Contender, Goal, Measured, Suite, measure


class Script:
    """Contenders that play back numbers, and a record of who was asked when. An exception is raised in its turn."""

    def __init__(self, **turns: list[float | BaseException]) -> None:
        self.calls: list[str] = []
        self.suite = suite(*(Contender(name=name, measure=self._player(name, turns[name])) for name in turns))

    def _player(self, name: str, turns: list[float | BaseException]) -> Callable[[], float]:
        left = iter(turns)

        def play() -> float:
            self.calls.append(name)
            turn = next(left)
            if isinstance(turn, BaseException):
                raise turn
            return turn

        return play


def suite(*contenders: Contender, **more) -> Suite:
    return Suite(name="s", measures="Something.", unit="s", contenders=contenders, baseline=contenders[0].name, **more)


def with_goal(script: Script, goal: Goal) -> Suite:
    return suite(*script.suite.contenders, goals=(goal,))


def test_contenders_take_turns_in_every_round() -> None:
    script = Script(a=[0, 1, 2, 3], b=[0, 1, 2, 3])
    measure(script.suite, 3)
    assert script.calls == ["a", "b"] * 4


def test_the_warm_up_round_is_run_but_does_not_count() -> None:
    result = measure(Script(a=[99, 1, 2], b=[99, 3, 4]).suite, 2)
    assert result.outcomes["a"].values == [1, 2]
    assert result.outcomes["b"].values == [3, 4]


def test_a_suite_can_ask_for_several_rounds_per_repeat() -> None:
    script = Script(a=list(range(7)))
    result = measure(suite(*script.suite.contenders, rounds_per_repeat=3), 2)
    assert result.rounds == 6
    assert result.outcomes["a"].values == [1, 2, 3, 4, 5, 6]


def test_ratios_are_formed_inside_a_round() -> None:
    # The machine became ten times slower after the first round. The medians alone would say 0.55, 1.1 or 11.
    result = measure(Script(a=[0, 1, 10], b=[0, 2, 20]).suite, 2)
    assert result.ratios("b") == [2, 2]
    assert result.ratios("a") == [1, 1]


def test_a_contender_that_always_fails_is_reported_and_the_rest_continue() -> None:
    script = Script(a=[0, 1, 2, 3], b=[OSError("no such program")] * 4, c=[0, 4, 5, 6])
    result = measure(script.suite, 3)
    assert result.outcomes["b"].failures == ["OSError: no such program"] * 2
    assert result.outcomes["b"].values == [None, None, None]
    assert result.spread("b") is None
    assert result.ratios("c") == [4, 2.5, 2]
    assert script.calls.count("b") == 2, "it is skipped after its second failure"


def test_one_failure_costs_a_contender_one_round_only() -> None:
    result = measure(Script(a=[0, 1, 1, 1], b=[0, 2, RuntimeError("port taken"), 4]).suite, 3)
    assert result.outcomes["b"].values == [2, None, 4]
    assert result.ratios("b") == [2, 4]


def test_when_the_baseline_fails_the_others_keep_their_values_but_have_no_ratios() -> None:
    result = measure(Script(a=[RuntimeError("out of memory")] * 2, b=[0, 5]).suite, 1)
    assert result.outcomes["b"].values == [5]
    assert result.ratios("b") == []


def test_ctrl_c_returns_the_measurements_so_far() -> None:
    script = Script(a=[0, 1, 2, 3], b=[0, 4, KeyboardInterrupt()], c=[0, 7])
    result = measure(script.suite, 3)
    assert result.is_interrupted
    assert result.outcomes["a"].values == [1, 2]
    assert result.outcomes["b"].values == [4, None]
    assert result.ratios("c") == [7]
    assert script.calls[-1] == "b", "nothing is measured after Ctrl-C"


def test_ctrl_c_during_warm_up_returns_no_measurements() -> None:
    result = measure(Script(a=[KeyboardInterrupt()], b=[1]).suite, 3)
    assert result.is_interrupted
    assert result.spread("a") is None


def test_every_measurement_is_reported_as_it_happens() -> None:
    seen: list[Measured] = []
    script = Script(a=[0, 1], b=[ValueError("bad"), ValueError("bad")])
    measure(script.suite, 1, seen.append)
    assert [(m.round, m.contender, m.value, m.failure) for m in seen] == [
        (0, "a", 0, None),
        (0, "b", None, "ValueError: bad"),
        (1, "a", 1, None),
        (1, "b", None, "ValueError: bad"),
    ]


@pytest.mark.parametrize(
    ("bound", "limit", "is_met", "agreeing"),
    [("at most", 1.5, True, 2), ("at most", 1.1, False, 2), ("at least", 1.1, True, 2), ("at least", 3.0, False, 3)],
)
def test_the_median_ratio_decides_a_goal_and_dissenting_rounds_are_counted(bound, limit, is_met, agreeing) -> None:
    script = Script(a=[0, 1, 1, 1], b=[0, 1.0, 1.2, 2.0])
    (verdict,) = measure(with_goal(script, Goal(contender="b", limit=limit, bound=bound)), 3).verdicts()
    assert verdict.is_met is is_met
    assert verdict.rounds_that_agree == agreeing


def test_a_goal_can_be_set_against_another_contender_than_the_baseline() -> None:
    script = Script(a=[0, 1, 1], b=[0, 2, 2], c=[0, 4, 8])
    goal = Goal(contender="c", limit=2.5, bound="at least", against="b")
    (verdict,) = measure(with_goal(script, goal), 2).verdicts()
    assert verdict.ratio is not None
    assert verdict.ratio.median == 3
    assert verdict.is_met


def test_a_goal_against_an_unknown_contender_is_rejected() -> None:
    with pytest.raises(AssertionError, match="no contender 'x'"):
        with_goal(Script(a=[0], b=[0]), Goal(contender="b", limit=1.0, against="x"))


def test_a_goal_without_measurements_is_neither_met_nor_missed() -> None:
    script = Script(a=[0, 1], b=[RuntimeError("no"), RuntimeError("no")])
    (verdict,) = measure(with_goal(script, Goal(contender="b", limit=1.0)), 1).verdicts()
    assert verdict.is_met is None


def test_a_suite_with_an_unknown_baseline_is_rejected() -> None:
    with pytest.raises(AssertionError, match="no contender 'x'"):
        Suite(name="s", measures="", unit="s", contenders=(Contender(name="a", measure=float),), baseline="x")


def test_two_contenders_of_the_same_name_are_rejected() -> None:
    with pytest.raises(AssertionError, match="same name"):
        suite(Contender(name="a", measure=float), Contender(name="a", measure=float))
