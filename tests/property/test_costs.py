"""Predictions of a step's time: what must hold for any workload, network and strategy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.planning.cost.exchange import exchange_s
from syncline.planning.cost.network import HostRates, Link, Network, read_link
from syncline.planning.cost.profile import Profile
from syncline.planning.cost.ranges import Range
from syncline.planning.cost.step import Workload, predict
from syncline.planning.cost.waiting import expected_largest, waiting_factor
from syncline.planning.cost.why import in_full, in_one_line
from syncline.strategies.explain import expected_bytes_per_step
from syncline.strategies.method import Method, ModelShapes
from syncline.strategies.presets import PRESETS
from syncline.strategies.traffic import Traffic

few = settings(max_examples=25)
"""Enough for formulas, most of which have no cases."""

presets = st.sampled_from(sorted(PRESETS))
seconds = st.floats(1e-5, 10.0)
shapes = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(1, 300), st.integers(1, 300)),
                         min_size=1, max_size=4)  # fmt: skip
links = st.builds(Link, bytes_per_s=st.floats(1e5, 1e11), latency_s=st.floats(0, 0.1))


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    return Range(*sorted(draw(st.tuples(seconds, seconds, seconds))))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    workers = draw(st.sampled_from([2, 4, 6, 8, 16]))
    profile = Profile(
        phases={name: draw(ranges()) for name in ("data", "forward", "backward", "update", "exchange")},
        waiting_s=draw(ranges()),
        noise_s=draw(st.floats(0, 1e-3)),
        share=draw(st.integers(1, 256)),
        workers=2,
        threads=1,
        strategy="allreduce",
        memory_bytes=10**9,
        intervals=9,
    )
    return Workload(
        profile=profile, shapes=ModelShapes(draw(shapes)), optimizer_slots=draw(st.integers(0, 2)),
        batch=workers * draw(st.integers(1, 64)), workers=workers, held_out_samples=40,
    )  # fmt: skip


@st.composite
def networks(draw: st.DrawFn, *, hosts: int | None = None) -> Network:
    count = hosts or draw(st.sampled_from([1, 2]))
    return Network(link=draw(links), hosts=count, cores=draw(st.integers(1, 8)), rates=HostRates())


@few
@given(presets, workloads(), networks())
def test_a_prediction_is_the_sum_of_its_terms_and_none_is_negative(name, workload, network):
    prediction = predict(workload, name, PRESETS[name].make().method, network)
    assert prediction is not None
    assert all(0 <= term.seconds.low <= term.seconds.mid <= term.seconds.high for term in prediction.terms)
    assert prediction.step_s.mid == pytest.approx(sum(term.seconds.mid for term in prediction.terms))
    assert prediction.samples_per_s.mid == pytest.approx(workload.batch / prediction.step_s.mid)
    assert type(prediction).from_dict(prediction.to_dict()) == prediction


@few
@given(presets, st.sampled_from([1, 2, 4, 6, 8]), shapes, st.integers(0, 2))
def test_traffic_counts_the_bytes_that_a_run_reports(name, workers, model, slots):
    method = PRESETS[name].make().method
    if workers < method.min_workers or (name == "h2o" and workers not in (1, 4, 6, 8)):
        return
    traffic = method.traffic(ModelShapes(model), workers, slots)
    expected = expected_bytes_per_step(PRESETS[name].make(), model, workers=workers, optimizer_slots=slots)
    assert sum(each.bytes_per_step for each in traffic) == pytest.approx(expected)


@few
@given(presets, workloads(), networks(hosts=2), st.floats(1.5, 100))
def test_a_slower_network_never_makes_a_step_faster(name, workload, network, factor):
    method = PRESETS[name].make().method
    link = Link(bytes_per_s=network.link.bytes_per_s / factor, latency_s=network.link.latency_s * factor)
    slow = dataclasses.replace(network, link=link)
    assert predict(workload, name, method, slow).step_s.mid >= predict(workload, name, method, network).step_s.mid


@few
@given(presets, workloads(), networks(), st.floats(0.05, 1.0))
def test_stragglers_never_make_a_step_faster_and_cost_nothing_where_nobody_waits(name, workload, network, sigma):
    method = PRESETS[name].make().method
    noisy = predict(dataclasses.replace(workload, straggling=sigma), name, method, network)
    quiet = predict(workload, name, method, network)
    assert noisy.step_s.mid >= quiet.step_s.mid
    if all(each.waits == "nobody" for each in method.traffic(workload.shapes, workload.workers, 0)):
        assert noisy.step_s == quiet.step_s


@few
@given(presets, workloads(), networks())
def test_the_explanation_names_each_term_with_its_own_numbers(name, workload, network):
    prediction = predict(workload, name, PRESETS[name].make().method, network)
    text = in_full(prediction)
    for term in prediction.terms:
        line = next(line for line in text.splitlines() if line.startswith(f"  {term.name} "))
        assert f"{100 * term.seconds.mid / prediction.step_s.mid:.0f}%" in line
    assert in_one_line(prediction)


@few
@given(st.integers(2, 64), st.integers(1, 10**8), links)
def test_a_ring_moves_less_than_twice_the_buffer_whatever_the_number_of_workers(workers, size, link):
    ring = Traffic(pattern="all-reduce", sent_bytes=size)
    network = Network(link=link, hosts=workers)
    bound = 4 * (workers - 1) * link.latency_s + 2 * size / link.bytes_per_s
    assert exchange_s(ring, workers, network).mid <= bound * (1 + 1e-9)


@few
@given(st.integers(2, 10_000), st.integers(1, 100))
def test_more_workers_wait_longer_and_rarer_exchanges_wait_less(workers, every):
    assert expected_largest(workers + 1) > expected_largest(workers) >= 0.5
    assert waiting_factor("all", workers, every=every + 1) < waiting_factor("all", workers, every=every)
    assert waiting_factor("nobody", workers) == 0


@few
@given(workloads(), networks())
def test_a_users_method_takes_part_by_declaring_its_bytes(workload, network):
    class Half(Method):
        steps = 5

        def bytes_per_step(self, model, workers, optimizer_slots=0):
            return model.exact_bytes / 2

    prediction = predict(workload, "mine.py:Half", Half(), network)
    assert prediction.bytes_per_step == pytest.approx(workload.shapes.exact_bytes / 2)
    assert prediction.term("exchange").mid > 0
    assert predict(workload, "mine.py:Silent", Method(), network) is None


@few
@given(st.sampled_from([("100mbit,1ms", 100e6, 1e-3), ("1ms, 10gbit", 10e9, 1e-3), ("56kbit", 56e3, 1e-4)]))
def test_a_network_is_read_from_its_rate_and_latency(case):
    text, bits, latency_s = case
    link = read_link(text)
    assert link.latency_s == latency_s
    assert link.bytes_per_s == pytest.approx(bits / 8 * 1448 / 1514)
