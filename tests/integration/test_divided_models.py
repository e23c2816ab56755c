"""Models that several processes compute together learn what they learn in one process."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from rank_processes import (
    Died,
    RankProcesses,
    SharedMemoryRanks,
    _open_shared_memory,
    abort,
    control_segment,
    start_fork_server,
    stop_fork_server,
)
from torch import nn
from torch.nn import functional as F

from syncline.comms.collective import Collective
from syncline.compute.recompute import recompute_activations
from syncline.errors import ConfigError, PeerFailed
from syncline.layouts.divided_model import TensorSplit
from syncline.layouts.optimizer_shards import OptimizerShards
from syncline.layouts.shards import pieces_by_rank, sizes_of
from syncline.models.zoo import lenet, lstm, mlp, transformer
from syncline.models.zoo.resnet import resnet18
from syncline.strategies.flat import FlatParameters

pytestmark = pytest.mark.xdist_group("divided-models")  # one process, because these tests share a fixture

TOKENS, TIME = 37, 9
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def processes_of() -> Iterator[Callable[[int], RankProcesses]]:
    """Processes for this module, by their number."""
    start_fork_server("transformers.models.gpt2.modeling_gpt2")
    opened: list[RankProcesses] = []

    @cache
    def processes(size: int) -> RankProcesses:
        opened.append(RankProcesses(size))
        return opened[-1]

    yield processes
    for each in opened:
        each.close()
    stop_fork_server()
    gc.collect()


# Models


class Case(NamedTuple):
    """A model and what it is trained with."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...] | None
    """The shape of a sample; None for tokens."""
    layers: int
    """How many are divided."""
    context: Callable[[], Any] | None = None


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": TOKENS, "n_positions": TIME}
    return Logits(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))


class Logits(nn.Module):
    """Of a model of transformers, in the order that cross_entropy wants."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x).logits
        return scores.transpose(1, 2)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, 13), nn.Tanh(), nn.Linear(13, 5))
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


class UsedInManyWays(nn.Module):
    """A layer that is called twice, whose weight is used by itself too, and is tied to that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        x = torch.tanh(F.linear(x, self.layer.weight.t()))
        return self.last(torch.tanh(self.tied(x))) + self.layer.weight.square().sum()


class Attentions(nn.Module):
    """Self-attention with every kind of mask, attention to others, and keys of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 12, padding_idx=3)
        self.encoder = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.1, batch_first=True)
        self.itself = nn.MultiheadAttention(12, 6)
        self.others = nn.MultiheadAttention(12, 2, batch_first=True)
        self.narrow = nn.MultiheadAttention(12, 4, kdim=6, vdim=6, bias=True, batch_first=True)
        self.classify = nn.Linear(12, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.get_default_dtype())
        states = self.encoder(self.tokens(x), src_mask=mask, src_key_padding_mask=torch.zeros(x.shape).where(x > 0, -9))
        turned = states.transpose(0, 1)
        seen, _ = self.itself(turned, turned, turned, attn_mask=mask, is_causal=True, need_weights=False)
        by_head = (mask < 0).repeat(6 * len(x), 1, 1)
        more, _ = self.itself(seen, seen, seen, key_padding_mask=x == 5, attn_mask=by_head, need_weights=False)
        last, weights = self.itself(more, more, more, attn_mask=mask)
        states = states + last.transpose(0, 1) * weights.square().mean()
        states = states + self.others(states, states.flip(1), states.flip(1))[0]
        states = states + self.narrow(states, states[..., :6], states[..., :6], need_weights=False)[0]
        return self.classify(states).transpose(1, 2)  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Every kind of padding, images of one channel, and others in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding="same", bias=False)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, (2, 3), padding="same"),
            nn.ReLU(inplace=True),
            nn.Conv2d(5, 4, 3, stride=2, padding=(2, 1), dilation=(2, 1)),
            nn.Conv2d(4, 7, 3, padding=1, padding_mode="circular"),
        ).to(memory_format=torch.channels_last)
        self.lines = nn.Conv1d(7, 6, 3, padding=1)
        self.classify = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).contiguous(memory_format=torch.channels_last)
        lines = self.lines(self.layers(x).flatten(2))
        alone = self.lines(lines.mean(0).repeat(2, 1)[:7])  # without a batch
        return self.classify(lines.mean(2) + alone.mean(1))  # type: ignore[no-any-return]


def recomputed() -> nn.Module:
    model = transformer.build((TIME,), TOKENS, TOKENS, 12, 2, 3, 0.1)
    assert recompute_activations(model) == 2
    return model


CASES = {
    "mlp": Case(lambda: mlp.build((8, 8), 10, (50, 30)), (8, 8), 3),
    "lenet": Case(lambda: lenet.build((1, 8, 8), 10), (1, 8, 8), 4),
    "resnet18": Case(lambda: resnet18((3, 8, 8), 10, 4, "cifar"), (3, 8, 8), 21),
    "lstm": Case(lambda: lstm.build((TIME,), TOKENS, TOKENS, 20, 1), None, 2),
    "transformer": Case(lambda: transformer.build((TIME,), TOKENS, TOKENS, 24, 2, 3, 0.1), None, 11),
    "gpt2": Case(gpt2, None, 11),
    "frozen": Case(frozen, (12,), 3),
    "used in many ways": Case(UsedInManyWays, (12,), 3),
    "attentions": Case(Attentions, None, 7),
    "convolutions": Case(Convolutions, (1, 6, 6), 6),
    "recomputed": Case(recomputed, None, 11),
}


def batches(case: Case, steps: int, dtype: torch.dtype) -> list[Batch]:
    """Of sizes that divide by nothing, and change from step to step."""
    torch.manual_seed(1)
    found = []
    for samples in ([7, 5, 11] * steps)[:steps]:
        if case.sample is None:
            found.append((torch.randint(TOKENS, (samples, TIME)), torch.randint(TOKENS, (samples, TIME))))
        else:
            found.append((torch.randn(samples, *case.sample, dtype=dtype), torch.randint(5, (samples,))))
    return found


# Training


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class Training(NamedTuple):
    """What one or several processes do."""

    name: str
    steps: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype = torch.float64
    autocast: bool = False

    def model(self) -> tuple[nn.Module, list[nn.Parameter]]:
        torch.set_default_dtype(self.dtype)
        torch.manual_seed(0)
        model = CASES[self.name].make()
        return model, [p for p in model.parameters() if p.requires_grad]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(batch[0]), batch[1])

    def batches(self) -> list[Batch]:
        return batches(CASES[self.name], self.steps, self.dtype)


class Trained(NamedTuple):
    """Parameters, buffers, and the outputs for the first batch in evaluation."""

    parameters: torch.Tensor
    buffers: list[torch.Tensor]
    output: torch.Tensor

    @classmethod
    def of(cls, model: nn.Module, parameters: list[nn.Parameter], batch: Batch) -> Trained:
        model.eval()
        with torch.no_grad():
            output = model(batch[0])
        return cls(FlatParameters(parameters).read(), [b.clone() for b in model.buffers()], output)


def train_alone(training: Training) -> Trained:
    given = training.batches()
    model, parameters = training.model()
    optimizer = training.optimizer(parameters)
    for batch in given:
        optimizer.zero_grad()
        training.loss(model, batch).backward()
        optimizer.step()
    return Trained.of(model, parameters, given[0])


def train_together(collective: Collective, training: Training) -> tuple[Trained, int]:
    """The result, and how many layers are divided. Updates are made as the workers of a run make them."""
    given = training.batches()
    model, parameters = training.model()
    memory = in_shared_memory(collective, parameters)
    gradients = collective.allocate_shared(memory.numel(), memory.dtype)
    split = TensorSplit(model, collective, smallest_numbers=1)
    lanes = [split.pieces(rank) for rank in range(collective.size)]
    first, last = (sum(sum(sizes_of(lane)) for lane in lanes[:n]) for n in (collective.rank, collective.rank + 1))
    shards = OptimizerShards(
        training.optimizer(parameters), parameters, memory, gradients, pieces_by_rank(lanes, 1, 2**19),
        rank=collective.rank, allocate=collective.allocate_shared,
    )  # fmt: skip
    for number, batch in enumerate(given):
        split.zero_gradients()
        training.loss(model, batch).backward()
        split.read_gradients(gradients[first:last])
        shards.begin_update(number)
        collective.barrier()
        shards.update()
        collective.barrier()
    trained = Trained.of(model, parameters, given[0])
    split.close()
    return trained, len(split.split.layers)


def in_shared_memory(collective: Collective, parameters: list[nn.Parameter]) -> torch.Tensor:
    flat = FlatParameters(parameters)
    memory = collective.allocate_shared(flat.numel, flat.dtype)
    if collective.rank == 0:
        flat.read(memory)
    collective.barrier()
    flat.move_to(memory)
    return memory


def train_both(training: Training, collective: Collective) -> tuple[Trained | None, Trained, int]:
    """Together, and on rank 0 alone too: there, what the models need is imported already."""
    try:
        together, layers = train_together(collective, training)
        return train_alone(training) if collective.rank == 0 else None, together, layers
    finally:
        torch.set_default_dtype(torch.float32)


def assert_same(answers: list[tuple[Trained | None, Trained, int]], **tolerance: float) -> None:
    expected = answers[0][0]
    assert expected is not None
    for _, found, _ in answers:
        torch.testing.assert_close(found.parameters, expected.parameters, **tolerance)
        torch.testing.assert_close(found.buffers, expected.buffers, **tolerance)
        torch.testing.assert_close(found.output, expected.output, **tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("size", "optimizer"), [(2, adamw), (3, sgd)])
def test_workers_together_learn_what_one_learns(processes_of, name, size, optimizer):
    run = SharedMemoryRanks(processes_of(size))
    answers = run(size, partial(train_both, Training(name, 4, optimizer)))
    assert {layers for _, _, layers in answers} == {CASES[name].layers}
    assert_same(answers, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_in_single_precision_they_agree_to_1e_5_after_20_steps(processes_of, name):
    run = SharedMemoryRanks(processes_of(2))
    assert_same(run(2, partial(train_both, Training(name, 20, adamw, torch.float32))), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet", "gpt2", "attentions"])
def test_with_autocast_they_round_as_one_does(processes_of, name):
    run = SharedMemoryRanks(processes_of(2))
    training = Training(name, 3, sgd, torch.float32, autocast=True)
    assert_same(run(2, partial(train_both, training)), rtol=0, atol=2e-3)


# Failures


def die_after_forward(collective: Collective) -> tuple[bool, type[BaseException], int]:
    """Whether a survivor's model computes by itself again, and its error."""
    torch.manual_seed(0)
    model = mlp.build((8, 8), 10, (50, 30))
    memory = in_shared_memory(collective, list(model.parameters()))
    before, x = memory.clone(), torch.randn(6, 8, 8)
    expected = model(x)
    split = TensorSplit(model, collective, smallest_numbers=1)
    loss = model(x).sum()
    if collective.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except PeerFailed as error:
        split.close()
        found = model(x)
        found.sum().backward()
        has_gradients = all(p.grad is not None for p in model.parameters())
        return torch.equal(found, expected) and torch.equal(memory, before) and has_gradients, type(error), 0
    raise AssertionError("The survivors must notice.")


def test_if_a_worker_dies_in_a_pass_the_others_notice_and_can_compute_by_themselves(processes_of):
    processes_of(2)  # the fork server is there
    processes = RankProcesses(3)
    try:
        with control_segment(3) as control:
            opener = partial(_open_shared_memory, control.address, 3, None)
            first, dead, last = processes.answers(opener, die_after_forward, partial(abort, control, 3))
    finally:
        processes.close()
    assert isinstance(dead, Died)
    assert first == last == (True, PeerFailed, 0)


def begin(collective: Collective) -> list[type]:
    """The modules of a model that cannot be divided."""
    model = mlp.build((8, 8), 10, (50,))
    with pytest.raises(ConfigError) as caught:
        TensorSplit(model, collective, smallest_numbers=1)
    assert (caught.value.code, caught.value.facts["reason"]) == ("layout", "shared-memory")
    return [type(module) for module in model]  # type: ignore[attr-defined]


def test_without_enough_shared_memory_the_model_is_refused_as_it_is(processes_of):
    assert SharedMemoryRanks(processes_of(2), limit_bytes=10_000)(2, begin) == 2 * [
        [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    ]
