"""Whole models, in tournaments: LTFB, "let a thousand flowers bloom" (Jacobs, Dryden, Pearce & Van Essen 2017).

Every worker trains a model of its own, from weights of its own, on its part of the data. Every n steps the workers are
paired at random; the two of a pair send each other their models, each scores both on data that it holds out from
training for this, and continues with the better one: its weights, its optimizer's state and its hyperparameters. Good
models spread without ever being averaged. With `perturb`, a worker that takes over a model varies its hyperparameters a
little, as in population-based training (Jaderberg et al. 2017). A model whose loss is not finite is no failure of the
run: it loses its next contest.

What the workers have in common, for evaluation and at the end, is the best model: the one with the best score on all
the held-out data together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from syncline.errors import ConfigError
from syncline.strategies.answers import Answers
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.how import Exact
from syncline.strategies.lazy import brackets, torch
from syncline.strategies.method import AnswersMethod, ModelShapes, Recovery, RunConditions, every, size
from syncline.strategies.traffic import Traffic
from syncline.strategies.what import Models
from syncline.strategies.when import Every
from syncline.strategies.whom import Rivals

if TYPE_CHECKING:
    from syncline.comms.collective import Collective
    from syncline.comms.mixing import Mixing


@dataclass(frozen=True)
class Tournament(AnswersMethod):
    """models | every(n) | rivals | exact."""

    what: Models
    when: Every
    whom: Rivals
    how: Exact

    title = "A tournament"
    because: ClassVar[Mapping[str, str]] = {
        "what": "Rivals compare whole models and keep the better one; they do not sum anything.",
        "when": "Two rivals must be at the same step to compete.",
        "whom": "Whole models compete in pairs.",
        "how": "A model after a lossy encoding is not the model that won.",
    }
    min_workers = 2
    has_separate_models = competes = True
    recovery: ClassVar[Recovery] = "merge"

    @classmethod
    def instead(cls, question: str, answers: Answers) -> Any:
        return Every(100) if question == "when" else super().instead(question, answers)

    @property
    def steps(self) -> int:
        return self.when.steps

    @property
    def held_out(self) -> float:
        return self.what.held_out

    @property
    def committed(self) -> str:
        return "If a worker fails, its replacement starts from another worker's model; other models are untouched."

    def check_run(self, run: RunConditions) -> None:
        super().check_run(run)
        if run.is_own_loop:
            raise ConfigError(
                "Models compete by their score on held-out data, and Syncline cannot score a model that a script "
                "trains in its own loop. Use syncline train, or another strategy such as gossip.",
                code="cannot-score-own-loop",
            )

    def bytes_per_step(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> float:
        paired = (workers - workers % 2) / workers  # with an odd number of workers, one has no rival
        return model.exact_bytes * (1 + optimizer_slots) * paired / self.steps

    def traffic(self, model: ModelShapes, workers: int, optimizer_slots: int = 0) -> tuple[Traffic, ...]:
        paired = (workers - workers % 2) / workers
        sent = float(model.exact_bytes * (1 + optimizer_slots))
        return (
            Traffic(pattern="peers", sent_bytes=sent, every=self.steps, waits="peers", senders=paired, scored_models=2),
        )

    def explain(self, model: ModelShapes, workers: int) -> list[str]:
        better = "lower loss" if self.what.score == "loss" else "higher accuracy"
        lines = [
            f"Each worker trains a model of its own. {every(self.steps)} the workers are paired at random; two rivals "
            f"send each other their models, and each continues with the one of {better} on held-out data "
            f"({100 * self.what.held_out:.3g}% of the training data, which is not trained on)."
        ]
        if self.what.perturb is not None:
            factor = f"{self.what.perturb:g}"
            lines.append(f"A worker that takes over a model varies its hyperparameters by a factor of up to {factor}.")
        if workers % 2:
            lines.append("The number of workers is odd, so one of them has no rival each time.")
        return [
            *lines,
            f"Each worker sends its whole model, {size(model.exact_bytes)} for {model.numel:,} parameters "
            f"({size(model.exact_bytes / self.steps)} per step), and its optimizer's state.",
        ]

    def exchange(self, replica: Replica) -> TournamentExchange:
        return TournamentExchange(replica, self)


_LIMITS = {"momentum": (0.0, 0.999)}
"""What varied hyperparameters must keep within."""


class TournamentExchange(LocalExchange):
    """An `Exchange`: models are trained apart and meet every n steps."""

    def __init__(self, replica: Replica, method: Tournament) -> None:
        super().__init__(replica, method)
        assert replica.score is not None, "the planner refuses tournaments where nothing can be scored"
        self._what, self._steps, self._score = method.what, method.steps, replica.score
        self._step = self._met_at = replica.step
        # A schedule sets the learning rate anew in every step, so what varies is a factor on whatever it says. The rate
        # is meant for the batch of all workers; a model that is trained on a K-th of it takes a K-th of the rate.
        self._lr_factor = 1.0 / replica.collective.size
        self._lrs: list[float] = []
        self._own: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """Every worker keeps the weights it has: different ones. With `perturb`, hyperparameters differ, too."""
        if self._what.perturb is not None:
            self._vary(round=0)

    def before_update(self, weight: float) -> bool:
        """Take the learning rate times this model's factor."""
        del weight
        self._lrs = [group["lr"] for group in self.replica.optimizer.param_groups]
        for group in self.replica.optimizer.param_groups:
            group["lr"] = group["lr"] * self._lr_factor
        return False

    def after_update(self, weight: float) -> bool:
        """Give the learning rate back to the schedule, and hold a tournament if it is time."""
        for group, lr in zip(self.replica.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        self._step += 1
        if self._step % self._steps:
            return False
        self._tournament(self._step // self._steps)
        self._met_at = self._step
        self.replica.collective.all_reduce_(self.replica.gradients.piggybacked, weight)
        return True

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The best model; afterwards every worker has its own again."""
        self._own = [t.clone() for t in self._model_tensors()]
        self._adopt_best()
        try:
            yield
        finally:
            _overwrite(self._model_tensors(), self._own)
            self._own = None

    def settle(self) -> None:
        self._adopt_best()

    def committed_steps(self) -> dict[int, int] | None:
        """Of the others, the steps up to the last tournament: afterwards another worker may have their model."""
        size, rank = self.replica.collective.size, self.replica.collective.rank
        return {**dict.fromkeys(range(size), self._met_at), rank: self._step}

    def merge(self, survivors: Collective) -> None:
        """Every worker keeps its own model, and takes it back if `shared` was interrupted."""
        survivors.barrier()
        if self._own is not None:
            _overwrite(self._model_tensors(), self._own)
            self._own = None

    def replacement_state(self) -> dict[str, Any] | None:
        """As this worker's: the replacement trains a copy of its model."""
        return self.private_state()

    def private_state(self) -> dict[str, Any]:
        """This worker's model, optimizer and hyperparameters."""
        own = self._own if self._own is not None else [t.clone() for t in self._model_tensors()]
        return {"own": own, "optimizer": self.replica.optimizer.state_dict(), "lr_factor": self._lr_factor}

    def load_private_state(self, state: dict[str, Any]) -> None:
        _overwrite(self._model_tensors(), state["own"])
        self.replica.optimizer.load_state_dict(state["optimizer"])
        self._lr_factor = state["lr_factor"]

    def _tournament(self, round: int) -> None:
        collective = self.replica.collective
        bracket = brackets.draw(range(collective.size), round, self.replica.seed)
        # Handing over models is a mixing in which every worker takes all of its rival's and nothing of its own.
        mixing: Mixing = {}
        for rank in range(collective.size):
            other = bracket.rival_of(rank)
            mixing[rank] = {rank if other is None else other: 1.0}
        tensors = self._all_tensors()
        numel = sum(t.numel() for t in tensors)
        if len(set(collective.all_gather(b"%d" % numel))) > 1:
            # A worker whose every loss so far was NaN has no optimizer state yet, so only models are exchanged.
            tensors = self._model_tensors()
        own, own_settings = [t.clone() for t in tensors], self._hyperparameters()
        own_score = self._score_now()
        theirs = _packed(own, own_settings)
        collective.mix_(theirs, mixing)
        rival = bracket.rival_of(collective.rank)
        if rival is None:
            return  # a bye
        settings = _unpack_into(tensors, theirs, own_settings)
        rival_score = self._score_now()
        took_over = brackets.rival_wins(own_score, rival_score, lower_is_better=self._what.score == "loss")
        if took_over:
            self._take(settings)
            if self._what.perturb is not None:
                self._vary(round)
        else:
            _overwrite(tensors, own)
        self.replica.log.exchanged()
        self.replica.log.contest(
            brackets.Contested(
                round=round,
                rival=rival,
                own_score=own_score,
                rival_score=rival_score,
                took_over=took_over,
                hyperparameters=self._hyperparameters(),
            )
        )

    def _score_now(self) -> float:
        loss, accuracy = self._score()
        return loss if self._what.score == "loss" else accuracy

    def _adopt_best(self) -> None:
        """Every worker scores its model on its own held-out data; that is fair as far as the parts are alike."""
        collective = self.replica.collective
        score = self._score_now()
        worth = -score if self._what.score == "loss" else score
        worths = torch.full((collective.size,), 0.0, dtype=torch.float64)
        worths[collective.rank] = worth if math.isfinite(worth) else -1e300
        with self.replica.log.outside():
            collective.all_reduce_(worths)
            best = int(worths.argmax())
            for tensor in self._model_tensors():
                collective.broadcast_(tensor, best)

    def _hyperparameters(self) -> dict[str, float]:
        group = self.replica.optimizer.param_groups[0]
        others = {k: group.get(k) for k in ("momentum", "weight_decay")}
        return {
            "lr_factor": self._lr_factor,
            **{k: float(v) for k, v in others.items() if isinstance(v, (int, float))},
        }

    def _take(self, settings: Mapping[str, float]) -> None:
        self._lr_factor = settings["lr_factor"]
        for group in self.replica.optimizer.param_groups:
            for name, value in settings.items():
                if name in group:
                    group[name] = value

    def _vary(self, round: int) -> None:
        assert self._what.perturb is not None
        settings = {k: v for k, v in self._hyperparameters().items() if v != 0.0}
        rank, seed, factor = self.replica.collective.rank, self.replica.seed, self._what.perturb
        self._take(brackets.perturb(settings, round=round, rank=rank, seed=seed, factor=factor, limits=_LIMITS))

    def _model_tensors(self) -> list[torch.Tensor]:
        return [t.detach() for t in [*self.replica.model.parameters(), *self.replica.model.buffers()]]

    def _all_tensors(self) -> list[torch.Tensor]:
        """The model and the optimizer's state, in the same order on every worker."""
        slots = [self.replica.optimizer.state.get(p, {}) for p in self.replica.gradients.parameters]
        state = [v for slot in slots for _, v in sorted(slot.items()) if isinstance(v, torch.Tensor)]
        return [*self._model_tensors(), *state]


def _packed(tensors: list[torch.Tensor], settings: Mapping[str, float]) -> torch.Tensor:
    numbers = torch.tensor([settings[name] for name in sorted(settings)])
    # A counter of batches, the only whole number in a model, is exact in float32 up to 16 million.
    return torch.cat([t.reshape(-1).to("cpu", torch.float32) for t in tensors] + [numbers])


def _unpack_into(tensors: list[torch.Tensor], packed: torch.Tensor, settings: Mapping[str, float]) -> dict[str, float]:
    offset = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(packed[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
    return dict(zip(sorted(settings), packed[offset:].tolist(), strict=True))


def _overwrite(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
