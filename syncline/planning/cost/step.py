"""What a step takes with a strategy: a sum of named terms, each with a range.

Here: `predict`, a pure function of the workload, the strategy's declarations and the network. Not here: the terms' own
formulas (`exchange.py`, `waiting.py`), which strategies to compare (`choice.py`), and words (`why.py`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from syncline.planning.cost.exchange import coding_s, exchange_s, saturated_s
from syncline.planning.cost.network import Network
from syncline.planning.cost.profile import COMPUTE, Profile
from syncline.planning.cost.ranges import ZERO, Range
from syncline.planning.cost.samples import samples_factor
from syncline.planning.cost.waiting import expected_largest, waiting_factor
from syncline.strategies.how import Exact
from syncline.strategies.method import Method, ModelShapes
from syncline.strategies.traffic import Traffic

TermName = Literal["data", "forward", "backward", "compute", "update", "encoding", "exchange", "waiting", "scoring"]
_OTHER_SHARE = 0.2
"""How wrong a time may be that was measured with twice or half the samples."""
_UNMEASURED_COPIES = 0.5
"""Memory that a strategy needs is counted in copies of the parameters, give or take half a copy."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of a step's time."""

    name: TermName
    seconds: Range
    facts: dict[str, float]
    """What it was computed from, for explanations."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, on how many workers, and what a step of it costs here."""

    profile: Profile
    shapes: ModelShapes
    optimizer_slots: int
    batch: int
    workers: int
    held_out_samples: int = 0
    straggling: float = 0.0
    """The deviation of the logarithm of a worker's time of a step, beyond what was measured."""
    slowest: float = 1.0
    """How many times slower than the others the slowest worker is."""

    @property
    def share(self) -> float:
        return self.batch / self.workers


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of a run."""

    strategy: str
    layout: str
    terms: tuple[Term, ...]
    batch: int
    workers: int
    bytes_per_step: float
    memory_bytes: Range
    start_up_s: float
    is_exact: bool
    """Whether the result is that of one process, whatever the number of workers."""
    samples: Range | None = None
    """How many times as many samples it needs as one process, for the same accuracy; None if that is not known."""

    @property
    def step_s(self) -> Range:
        return Range.sum(term.seconds for term in self.terms)

    @property
    def samples_per_s(self) -> Range:
        step = self.step_s
        return Range(self.batch / step.high, self.batch / step.mid, self.batch / step.low)

    def term(self, name: TermName) -> Range:
        return Range.sum(term.seconds for term in self.terms if term.name == name)

    def part(self, name: TermName) -> float:
        """The part of a step that this term takes."""
        return self.term(name).mid / self.step_s.mid

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": asdict(self.step_s), "samples_per_s": asdict(self.samples_per_s)}

    @classmethod
    def from_dict(cls, data: Any) -> Prediction:
        return msgspec.convert(data, cls)


def predict(workload: Workload, strategy: str, method: Method, network: Network) -> Prediction | None:
    """The time of a step; None if the method does not declare what it sends, so that only a run can show it."""
    workers, shapes = workload.workers, workload.shapes
    method = method.on_hosts(network.hosts, workers)
    traffic = method.traffic(shapes, workers, workload.optimizer_slots)
    if traffic is None:
        return None
    computing = computing_terms(workload, network)
    compute_s = Range.sum(term.seconds for term in computing)
    terms = [
        *_slowed(computing, workload, traffic),
        *_exchange_terms(workload, traffic, compute_s, network),
        *_waiting_terms(workload, traffic, compute_s),
        *_scoring_terms(workload, traffic, computing),
    ]
    is_exact = workers == 1 or (method.is_lock_step and all(each.encoding == Exact() for each in traffic))
    return Prediction(
        strategy=strategy,
        layout="replicated",
        terms=tuple(terms),
        batch=workload.batch,
        workers=workers,
        bytes_per_step=sum(each.bytes_per_step for each in traffic),
        memory_bytes=memory_bytes(workload, method),
        start_up_s=workload.profile.start_up_s,
        is_exact=is_exact,
        samples=samples_factor(strategy, is_exact=is_exact),
    )


def computing_terms(workload: Workload, network: Network) -> list[Term]:
    """What a worker computes, from the profile: more samples take longer, and so do more workers than cores."""
    profile = workload.profile
    more = workload.share / profile.share
    crowd = _crowd(math.ceil(workload.workers / network.hosts), profile.threads, network.cores)
    crowd /= _crowd(profile.workers, profile.threads, network.cores)
    terms = []
    for name in COMPUTE:
        if name not in profile.phases:
            continue
        factor = crowd * (1.0 if name == "update" else more)
        seconds = profile.phases[name] * factor
        if not math.isclose(factor, 1.0, rel_tol=0.02):
            seconds += Range(-_OTHER_SHARE * seconds.low, 0.0, _OTHER_SHARE * seconds.high)
        terms.append(Term(name=name, seconds=seconds, facts={"measured_s": profile.phases[name].mid, "factor": factor}))
    return terms


def _crowd(workers: int, threads: int, cores: int) -> float:
    return max(1.0, workers * threads / cores)


def _slowed(computing: list[Term], workload: Workload, traffic: tuple[Traffic, ...]) -> list[Term]:
    """With one slow worker, the others wait for it, or leave it behind."""
    if workload.slowest == 1.0:
        return computing
    all_wait = any(each.waits in ("all", "peers", "bound") for each in traffic)
    n = workload.workers
    factor = workload.slowest if all_wait else n / (n - 1 + 1 / workload.slowest)
    return [
        Term(name=term.name, seconds=term.seconds * factor, facts={**term.facts, "slow_worker": factor})
        for term in computing
    ]


def _exchange_terms(workload: Workload, traffic: tuple[Traffic, ...], compute_s: Range, network: Network) -> list[Term]:
    exchange, coding, facts = ZERO, ZERO, {"bytes": 0.0, "rounds": 0.0, "every": 1.0}
    for each in traffic:
        once = exchange_s(each, workload.workers, network)
        if each.is_hidden:  # what takes longer than a step is seen, and so are queues at the servers
            rounds = network.rates.server_round_s * 2
            queue = saturated_s(each, workload.workers, network).most(once)
            once = rounds + queue.beyond(compute_s * each.every)
        elif each.waits == "nobody":
            once = once.most(saturated_s(each, workload.workers, network).beyond(compute_s * each.every))
        exchange += once * (each.senders if each.waits == "nobody" else 1.0) * (1 / each.every)
        coding += coding_s(each, workload.workers, workload.shapes.numel, network.rates) * (1 / each.every)
        facts = {
            "bytes": facts["bytes"] + each.bytes_per_step,
            "rounds": facts["rounds"] + 1 / each.every,
            "every": max(facts["every"], each.every),
        }
    terms = [Term(name="exchange", seconds=exchange, facts=facts)] if traffic else []
    if coding.mid:
        terms.insert(0, Term(name="encoding", seconds=coding, facts={"numbers": workload.shapes.numel}))
    return terms


def _waiting_terms(workload: Workload, traffic: tuple[Traffic, ...], compute_s: Range) -> list[Term]:
    """Of the exchanges that wait, the one that waits longest counts: after it, the workers are together."""
    n, profile = workload.workers, workload.profile
    factors = [waiting_factor(each.waits, n, every=each.every, bound=each.bound) for each in traffic]
    factor = max(factors, default=0.0)
    if not factor:
        return []
    noise_s = profile.noise_s * compute_s.mid / max(profile.compute_s.mid, 1e-12)
    added_s = compute_s.mid * (math.exp(workload.straggling * factor) - 1) if workload.straggling else 0.0
    measured_s = Range.around(noise_s * factor, 0.5)
    if profile.waiting_s.mid and profile.workers > 1:
        # What lock-step workers waited for each other in the profile, for this number of them and this strategy.
        scale = factor / expected_largest(profile.workers) * compute_s.mid / max(profile.compute_s.mid, 1e-12)
        measured_s = profile.waiting_s * scale
    seconds = measured_s + Range.around(added_s, 0.3)
    return [Term(name="waiting", seconds=seconds, facts={"workers": n, "deviations": factor})]


def _scoring_terms(workload: Workload, traffic: tuple[Traffic, ...], computing: list[Term]) -> list[Term]:
    """Rivals score models on held-out samples: forward passes."""
    models = sum(each.scored_models * each.senders / each.every for each in traffic)
    if not models:
        return []
    forward = Range.sum(term.seconds for term in computing if term.name == "forward")
    samples = workload.held_out_samples / workload.workers
    seconds = forward * (models * samples / workload.share)
    return [Term(name="scoring", seconds=seconds, facts={"models_per_step": models, "samples": samples})]


def memory_bytes(workload: Workload, method: Method) -> Range:
    """A worker's peak: what was measured in the profile, and the copies of the parameters that the strategy keeps."""
    copies = method.memory_copies(workload.optimizer_slots) if workload.workers > 1 else 0.0
    measured, more = workload.profile.memory_bytes, copies * workload.shapes.exact_bytes
    unsure = _UNMEASURED_COPIES * workload.shapes.exact_bytes if copies else 0.0
    total = max(0.0, measured + more)
    return Range(max(0.0, total - unsure), total, total + unsure)
