"""Scripted faults as text: parsing and printing are inverse, and an error shows the allowed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.lab.faults import Fault, as_script, read_fault, read_script, read_seconds

steps = st.integers(0, 10**9)
workers = st.integers(0, 1023)
times = st.none() | st.floats(1e-6, 1e6)
faults = st.one_of(
    st.builds(Fault, st.just("kill"), steps, workers, st.booleans()),
    st.builds(Fault, st.just("stop"), steps, workers, st.booleans(), for_s=times),
    st.builds(Fault, st.just("slow"), steps, workers, factor=st.floats(1, 1e6), for_s=times),
    st.builds(Fault, st.just("slow"), steps, workers, delay_s=st.floats(1e-6, 1e6), for_s=times),
    st.builds(Fault, st.sampled_from(["raise", "disconnect"]), steps, workers),
    st.builds(Fault, st.just("cut"), steps, workers, for_s=times),
    st.builds(Fault, st.just("lose"), steps, workers, percent=st.floats(1e-6, 100), for_s=times),
    st.builds(Fault, st.just("fill"), steps, for_s=times),
)


@given(faults)
def test_a_printed_fault_parses_as_the_same_fault(fault):
    assert read_fault(str(fault)) == fault


@given(st.lists(faults, max_size=4))
def test_a_printed_script_parses_as_the_same_faults(script):
    assert read_script(as_script(script)) == tuple(script)
    assert read_script("\n".join(map(str, script)) + "\n;;") == tuple(script)


@given(faults, st.sampled_from([" ", "  ", "\t"]))
def test_case_and_space_do_not_matter(fault, space):
    assert read_fault(f" {str(fault).upper().replace(' ', space)} ") == fault


@given(st.text(max_size=60) | st.from_regex(r"(kill|stop|slow) worker 1 at( step| 9| by| 5x| for| 2s){0,6}"))
def test_any_text_is_a_fault_or_a_config_error(text):
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
def test_documented_forms_are_parsed(text, fault):
    assert read_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil worker 2 at step 4", "Did you mean 'kill'"),
        ("kill worker 2", "kill worker K at step N"),
        ("slow worker 2 at step 4", "by 5x"),
        ("slow worker 2 at step 4 by 0.5x", "1 or more"),
        ("lose 120% of packets to worker 0 at step 1", "at most 100"),
        ("lose 0% of packets to worker 0 at step 1", "above 0"),
        ("stop worker 0 at step 1 for 0s", "more than 0"),
        ("kill worker 0 at step 1 for 5s", "kill worker K at step N"),
        ("raise in server 0 at step 1", "raise in worker K at step N"),
        ("kill worker 0 at step " + "9" * 400, "too large"),
    ],
)
def test_a_mistake_names_the_allowed_form(text, words):
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
def test_a_meaningless_fault_cannot_be_constructed(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(("text", "seconds"), [("3s", 3.0), ("250ms", 0.25), (" 2 min ", 120.0), ("1.5e1s", 15.0)])
def test_times_need_a_unit(text, seconds):
    assert read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["3", "s", "-1s", "3 hours", "", "nans"])
def test_a_time_without_a_unit_is_rejected_with_an_example(text):
    with pytest.raises(ConfigError, match="3s, 250ms or 2min"):
        read_seconds(text)
