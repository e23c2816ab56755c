"""The server's pure parts on arbitrary inputs: tensors, requests, batches, changes of versions, and HTTP in pieces."""

from __future__ import annotations

import json
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from syncline.serving.server.batching import InferenceJob, run_together, take_batch
from syncline.serving.server.canary import FEWEST, AnswerStats, Canary, worse_because
from syncline.serving.server.catalog import Catalog, ServedVersion
from syncline.serving.server.control import Apply, Prepare, Prepared
from syncline.serving.server.datatypes import DTYPES, datatype_of, from_bytes, from_json, to_bytes, to_json
from syncline.serving.server.messages import InferRequest, encode_response, parse_request
from syncline.serving.server.refusal import RequestRefused
from syncline.serving.server.rollout import Rollout
from syncline.serving.server.signature import Signature, TensorSpec
from syncline.serving.server.versions import next_version, replaced, rolled_back, unloaded

NUMBERS = [name for name in DTYPES if name != "BYTES"]
SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 3)),))


def parsed(body: bytes, json_size: int | None) -> InferRequest | RequestRefused:
    try:
        return parse_request(body, json_size, SIGNATURE)
    except RequestRefused as refusal:
        return refusal


@st.composite
def tensors(draw, names=tuple(NUMBERS)):
    datatype = draw(st.sampled_from(names))
    shape = draw(arrays.array_shapes(max_dims=3, max_side=4))
    finite = {"allow_nan": False, "allow_infinity": False} if DTYPES[datatype].kind == "f" else {}
    elements = arrays.from_dtype(DTYPES[datatype], **finite)
    return datatype, draw(arrays.arrays(DTYPES[datatype], shape, elements=elements))


@given(tensors())
def test_binary_tensors_are_read_as_they_were_written(made):
    datatype, array = made
    again = from_bytes(to_bytes(array), datatype, array.shape, "x")
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)


@given(tensors([name for name in NUMBERS if name != "FP16"]), st.booleans())
def test_json_tensors_are_read_as_they_were_written_flat_or_nested(made, nested):
    datatype, array = made
    data = json.loads(json.dumps(array.tolist() if nested else to_json(array)))
    again = from_json(data, datatype, array.shape, "x")
    assert datatype_of(again.dtype) == datatype
    assert np.array_equal(again, array)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_strings_survive_both_forms(words):
    array = np.array(words, object)
    assert from_bytes(to_bytes(array), "BYTES", [len(words)], "x").tolist() == words
    assert from_json(words, "BYTES", [len(words)], "x").tolist() == words


@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(0, 400)))
def test_arbitrary_bytes_are_a_request_or_are_refused(body, json_size):
    found = parsed(body, json_size)
    assert isinstance(found, InferRequest) or 400 <= found.status < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {
            "inputs": st.lists(
                st.fixed_dictionaries(
                    {"name": st.sampled_from(["x", "z"]), "shape": st.lists(st.integers(-2, 4), max_size=4)},
                    optional={
                        "datatype": st.sampled_from([*DTYPES, "BF16"]),
                        "data": JSON,
                        "parameters": st.dictionaries(
                            st.sampled_from(["binary_data_size", "shared_memory_region", "other"]), JSON, max_size=2
                        ),
                    },
                ),
                max_size=3,
            )
        },
        optional={"id": JSON, "outputs": JSON, "parameters": JSON},
    )
)
def test_requests_that_are_almost_right_are_read_or_refused(request):
    body = json.dumps(request).encode()
    found = parsed(body, None)
    if isinstance(found, RequestRefused):
        assert 400 <= found.status < 500
    else:
        assert found.tensors["x"].shape == tuple(request["inputs"][0]["shape"])
        assert found.tensors["x"].dtype == np.float32


@given(st.lists(st.sampled_from(["a", "b", "c"]), unique=True), st.booleans(), st.text(max_size=8))
def test_responses_hold_exactly_the_outputs_that_were_asked_for(wanted, is_binary, identity):
    outputs = {name: np.full((2, k + 1), k, np.float32) for k, name in enumerate("abc")}
    request = InferRequest({}, identity, tuple((name, is_binary) for name in wanted), is_binary)
    body, size = encode_response(request, "m", "7", outputs)
    head = json.loads(body[:size])
    assert [one["name"] for one in head["outputs"]] == (wanted or ["a", "b", "c"])
    assert (head["model_name"], head["model_version"], head.get("id", "")) == ("m", "7", identity)
    place = size
    for one in head["outputs"]:
        expected = outputs[one["name"]]
        assert one["shape"] == list(expected.shape)
        if is_binary:
            count = one["parameters"]["binary_data_size"]
            assert np.array_equal(np.frombuffer(body[place : place + count], "<f4"), expected.ravel())
            place += count
        else:
            assert one["data"] == expected.ravel().tolist()


# batches


def job(rows: int, value: float = 0.0, width: int = 3) -> InferenceJob:
    return InferenceJob(
        {"x": np.full((max(rows, 1), width), value, np.float32)}, rows, ((width,),), lambda _: None, 0.0
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2)), min_size=1, max_size=30), st.integers(1, 8))
def test_batches_take_every_job_once_in_order_and_keep_their_limit(sizes, most):
    jobs = [job(rows, width=width) for rows, width in sizes]
    queue, seen = deque(jobs), []
    while queue:
        batch = take_batch(queue, most)
        seen += batch
        assert len(batch) == 1 or sum(one.rows for one in batch) <= most
        assert len({one.shapes for one in batch}) == 1
        assert len(batch) == 1 or all(one.rows for one in batch)
    assert [id(one) for one in seen] == [id(one) for one in jobs]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_each_job_of_a_batch_gets_its_own_rows(rows):
    jobs = [job(count, value=k) for k, count in enumerate(rows)]
    results = run_together(lambda given: [given["x"] * 2], ["y"], jobs)
    for k, (result, count) in enumerate(zip(results, rows, strict=True)):
        assert np.array_equal(result["y"], np.full((count, 3), 2 * k, np.float32))


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_a_job_that_fails_fails_alone(is_bad):
    def run(given):
        if (given["x"] < 0).any():
            raise ValueError("negative")
        return [given["x"]]

    results = run_together(run, ["y"], [job(1, value=-1.0 if bad else 1.0) for bad in is_bad])
    assert [isinstance(result, ValueError) for result in results] == is_bad


def test_a_model_that_returns_other_rows_than_it_got_is_not_split():
    results = run_together(lambda given: [given["x"][:1]], ["y"], [job(1, 1.0), job(1, 2.0)])
    assert [result["y"][0, 0] for result in results] == [1.0, 2.0]


# versions


def served(model="m", version="1", role="stable") -> ServedVersion:
    return ServedVersion(model=model, version=version, path=f"{model}{version}", role=role)


@given(st.lists(st.sampled_from(["new", "unload"]), max_size=12))
def test_a_version_number_is_used_once(steps):
    catalog, seen = Catalog(), []
    for step in steps:
        if step == "new":
            old = catalog.versions[0] if catalog.versions else None
            seen.append(next_version(catalog, "m"))
            catalog = replaced(catalog, old, served(version="0"), "newer")
            assert [v.version for v in catalog.versions] == [seen[-1]]
        else:
            catalog = unloaded(catalog, "m", "unloaded")
            assert catalog.versions == ()
    assert len(set(seen)) == len(seen)


def test_only_a_canary_is_rolled_back():
    catalog = Catalog(versions=(served(), served(version="2", role="canary")))
    after = rolled_back(catalog, "m", "2", "slow")
    assert [v.version for v in after.versions] == ["1"]
    assert [(w.version, "slow" in w.reason) for w in after.withdrawn] == [("2", True)]
    assert rolled_back(after, "m", "1", "slow").versions == after.versions


class Processes:
    """Processes as the supervisor sees them; what is sent to them waits until it is delivered."""

    def __init__(self, count: int) -> None:
        self.rollout = Rollout(Catalog(), lambda process, message: self.inbox[process].append(message))
        self.inbox: dict[int, deque] = {}
        self.serves: dict[int, int] = {}
        for process in range(count):
            self.start(process)

    def start(self, process: int) -> None:
        self.inbox[process] = deque()
        self.serves[process] = self.rollout.catalog.generation
        self.rollout.on_ready(process, self.serves[process])

    def kill(self, process: int) -> None:
        del self.serves[process]
        self.rollout.on_gone(process)
        self.start(process)

    def deliver(self, process: int, fails: bool = False) -> None:
        if not self.inbox[process]:
            return
        message = self.inbox[process].popleft()
        if isinstance(message, Prepare):
            error = "broken" if fails else None
            self.rollout.on_prepared(process, Prepared(message.catalog.generation, error))
        else:
            assert isinstance(message, Apply)
            self.serves[process] = message.catalog.generation
            self.rollout.on_ready(process, message.catalog.generation)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["change", "deliver", "fail", "kill"]), st.integers(0, 2)), max_size=60),
)
def test_every_change_ends_and_all_processes_serve_the_same(count, steps):
    world, ended = Processes(count), []
    asked = 0
    for what, which in steps:
        if what == "change":
            asked += 1
            edit = lambda c, k=asked: replaced(c, None, served(model=f"m{k}"), "")  # noqa: E731
            world.rollout.change(edit, lambda error: ended.append((error, dict(world.serves), world.rollout.catalog)))
        elif what == "kill":
            world.kill(which % count)
        else:
            world.deliver(which % count, fails=what == "fail")
    for _ in range(20 * (asked + 1)):
        for process in range(count):
            world.deliver(process)
    assert len(ended) == asked
    assert set(world.serves.values()) == {world.rollout.catalog.generation}
    for error, serves, catalog in ended:
        assert error == "broken" or set(serves.values()) <= {catalog.generation}


# canaries


@given(st.floats(0.01, 0.99), st.integers(1, 500))
def test_a_canary_gets_its_share_to_within_one_request(share, count):
    canary = Canary(share)
    taken = sum(canary.takes_next() for _ in range(count))
    assert abs(taken - share * count) <= 1 + 1e-6


def answers(count: int, errors: int, seconds: float) -> AnswerStats:
    found = AnswerStats()
    for k in range(count):
        found.add(seconds, is_error=k < errors)
    return found


@pytest.mark.parametrize(
    ("canary", "is_worse"),
    [
        (answers(FEWEST - 1, FEWEST - 1, 0.001), False),  # too early
        (answers(100, 0, 0.001), False),
        (answers(100, 10, 0.001), True),
        (answers(100, 1, 0.001), False),
        (answers(100, 0, 0.010), True),
        (answers(100, 0, 0.0015), False),  # a difference below a millisecond is noise
    ],
)
def test_a_canary_is_worse_if_it_fails_or_is_slow(canary, is_worse):
    assert (worse_because(answers(100, 0, 0.001), canary) is not None) == is_worse


def labels(right: int, wrong: int) -> AnswerStats:
    found = answers(100, 0, 0.001)
    found.add_labels([True] * right + [False] * wrong)
    return found


@pytest.mark.parametrize(
    ("canary", "is_worse"),
    [
        (labels(0, FEWEST - 1), False),  # too early
        (labels(980, 20), False),
        (labels(970, 30), False),  # chance
        (labels(900, 100), True),
        (labels(10, 10), True),
        (labels(1000, 0), False),
    ],
)
def test_a_canary_is_worse_if_it_is_wrong_more_often_than_chance_explains(canary, is_worse):
    assert (worse_because(labels(980, 20), canary) is not None) == is_worse


def test_chance_alone_hardly_ever_rolls_back_a_canary_that_is_as_good():
    rng, streams, ended = np.random.default_rng(0), 300, 0
    for _ in range(streams):
        canary, right = Canary(0.2), rng.random(1000) < 0.9
        ended += any(canary.observe_labels([bool(one)], is_canary=canary.takes_next()) for one in right)
    assert ended <= 0.01 * streams
