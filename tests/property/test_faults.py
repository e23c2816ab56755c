"""Scripted faults as text: reading and printing are inverse, and a mistake is answered with what is allowed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.testing.faults import Fault, as_script, read_fault, read_script, read_seconds

steps = st.integers(0, 10**9)
ranks = st.integers(0, 1023)
times = st.none() | st.floats(1e-6, 1e6)
faults = st.one_of(
    st.builds(Fault, st.just("kill"), steps, ranks, st.booleans()),
    st.builds(Fault, st.just("stop"), steps, ranks, st.booleans(), for_s=times),
    st.builds(Fault, st.just("slow"), steps, ranks, factor=st.floats(1, 1e6), for_s=times),
    st.builds(Fault, st.just("slow"), steps, ranks, delay_s=st.floats(1e-6, 1e6), for_s=times),
    st.builds(Fault, st.sampled_from(["raise", "disconnect"]), steps, ranks),
    st.builds(Fault, st.just("cut"), steps, ranks, for_s=times),
    st.builds(Fault, st.just("lose"), steps, ranks, percent=st.floats(1e-6, 100), for_s=times),
    st.builds(Fault, st.just("fill"), steps, for_s=times),
)


@given(faults)
def test_what_is_printed_reads_as_the_same_fault(fault):
    assert read_fault(str(fault)) == fault


@given(st.lists(faults, max_size=4))
def test_a_script_reads_as_the_same_faults(script):
    assert read_script(as_script(script)) == tuple(script)
    assert read_script("\n".join(map(str, script)) + "\n;;") == tuple(script)


@given(faults, st.sampled_from([" ", "  ", "\t"]))
def test_case_and_space_do_not_matter(fault, space):
    assert read_fault(f" {str(fault).upper().replace(' ', space)} ") == fault


@given(st.text(max_size=60) | st.from_regex(r"(kill|stop|slow) worker 1 at( step| 9| by| 5x| for| 2s){0,6}"))
def test_any_text_is_a_fault_or_refused_as_a_mistake_of_the_user(text):
    try:
        fault = read_fault(text)
    except ConfigError:
        return
    assert read_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill worker 2 at step 412", Fault("kill", 412, 2)),
        ("kill server 0 at step 20", Fault("kill", 20, 0, is_server=True)),
        ("stop worker 1 at step 50 for 250 ms", Fault("stop", 50, 1, for_s=0.25)),
        ("slow worker 0 at step 10 by 5x", Fault("slow", 10, 0, factor=5)),
        ("slow worker 0 at step 10 by 0.2s for 2min", Fault("slow", 10, 0, delay_s=0.2, for_s=120)),
        ("raise in worker 1 at step 7", Fault("raise", 7, 1)),
        ("cut worker 1 at step 30 for 5s", Fault("cut", 30, 1, for_s=5)),
        ("disconnect worker 1 at step 30", Fault("disconnect", 30, 1)),
        ("lose 10% of packets to worker 1 at step 30", Fault("lose", 30, 1, percent=10)),
        ("fill the disk at step 20 for 5s", Fault("fill", 20, for_s=5)),
    ],
)
def test_what_people_write_is_understood(text, fault):
    assert read_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil worker 2 at step 4", "Did you mean 'kill'? There are: kill worker K at step N"),
        ("kill worker 2", "Cannot read 'kill worker 2'. Write it as: kill worker K at step N"),
        ("slow worker 2 at step 4", "by 5x"),
        ("slow worker 2 at step 4 by 0.5x", "the factor must be 1 or more"),
        ("lose 120% of packets to worker 0 at step 1", "at most 100"),
        ("lose 0% of packets to worker 0 at step 1", "above 0"),
        ("stop worker 0 at step 1 for 0s", "more than 0"),
        ("kill worker 0 at step 1 for 5s", "Write it as: kill worker K at step N"),
        ("raise in server 0 at step 1", "Write it as: raise in worker K at step N"),
        ("kill worker 0 at step " + "9" * 400, "beyond all runs"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(text, words):
    with pytest.raises(ConfigError) as caught:
        read_fault(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault("explode", 1, 1),  # type: ignore[arg-type]
        lambda: Fault("kill", -1, 1),
        lambda: Fault("kill", 1),
        lambda: Fault("fill", 1, 1),
        lambda: Fault("cut", 1, 1, is_server=True),
        lambda: Fault("kill", 1, 1, for_s=1),
        lambda: Fault("slow", 1, 1),
        lambda: Fault("slow", 1, 1, factor=2, delay_s=1),
        lambda: Fault("kill", 1, 1, factor=2),
        lambda: Fault("kill", 1, 1, percent=2),
        lambda: Fault("stop", 1, 1, for_s=math.inf),
    ],
)
def test_a_fault_that_means_nothing_cannot_be_made(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(("text", "seconds"), [("3s", 3.0), ("250ms", 0.25), (" 2 min ", 120.0), ("1.5e1s", 15.0)])
def test_times_are_read_with_their_unit(text, seconds):
    assert read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["3", "s", "-1s", "3 hours", "", "nans"])
def test_a_time_without_a_unit_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="Write it as 3s, 250ms or 2min"):
        read_seconds(text)
