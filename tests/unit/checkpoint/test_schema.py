"""What a checkpoint holds: the present version is read, anything else is refused with a reason.

`written_by_version_4/` holds a checkpoint of a real run: an `nn.Linear(2, 2)` with SGD and StepLR, one worker, 3 steps
of 4 out of 8 samples, `sparknet(2)`. If a test here fails after a change, the format has changed: raise `VERSION`, and
write the fixture again with the new code.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from syncline.checkpoint import store
from syncline.checkpoint.schema import VERSION, CheckpointState, TrainingProgress, TrainingState
from syncline.data.assignment import Position
from syncline.data.ledger import Opened, Used, decode
from syncline.errors import CheckpointError
from syncline.workers.train_state import Parts, TrainState

WRITTEN = Path(__file__).parent / f"written_by_version_{VERSION}"


@pytest.fixture
def written():
    (checkpoint,) = store.checkpoints_in(WRITTEN)
    return store.load(checkpoint)


def test_a_checkpoint_of_the_present_version_is_read_as_it_was_written(written):
    state = CheckpointState.from_dict(written)
    assert state.position == Position(epoch=1, cursor=4, step=3, extra=0)
    assert state.requeued == ()
    assert {name: tuple(tensor.shape) for name, tensor in state.model.items()} == {"weight": (2, 2), "bias": (2,)}
    assert state.optimizer["param_groups"][0]["momentum"] == 0.9
    assert state.learning_rates == pytest.approx([0.01])
    assert [scheduler["last_epoch"] for scheduler in state.schedulers] == [1]
    assert set(state.metrics) == {"train/loss", "test/loss", "test/accuracy"}
    assert (state.epochs_closed, state.evaluated_at) == (1, 3)
    assert state.tuning is not None
    assert state.tuning["memory_format"] == "contiguous"
    assert len(state.worker_states) == 1, "sparknet keeps an optimizer on each worker"
    assert [type(decode(line.encode())) for line in state.ledger] == [Opened, Used]


def test_training_continues_from_a_checkpoint_of_the_present_version(written):
    def build() -> Parts:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Parts(model, optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1)])

    state = TrainState(build)
    state.load(CheckpointState.from_dict(written))
    assert torch.equal(state.model.weight, written["model"]["weight"])
    assert state.lr == pytest.approx(0.01)
    assert state.metrics == written["metrics"]


def test_the_keys_in_the_file_are_the_fields_of_the_schema(written):
    assert set(written) == {"version", *(field.name for field in fields(CheckpointState))}


def test_a_state_that_was_converted_to_a_dict_and_back_is_the_same(written):
    state = CheckpointState.from_dict(written)
    again = CheckpointState.from_dict(CheckpointState(**{**vars(state), "requeued": ((0, 2, 4),)}).to_dict())
    assert again.requeued == ((0, 2, 4),)
    assert again.position == state.position
    assert TrainingState.from_dict(state.to_dict()).model is state.model, "tensors are not copied"
    assert set(TrainingProgress.from_dict(state.to_dict()).to_dict()) < set(state.to_dict())


@pytest.mark.parametrize("version", [1, VERSION + 1, None, "2"])
def test_another_version_is_refused_with_both_numbers(written, version):
    with pytest.raises(CheckpointError) as caught:
        CheckpointState.from_dict({**written, "version": version})
    assert caught.value.code == "checkpoint-version"
    assert caught.value.facts == {"version": version, "supported": VERSION}
    assert str(VERSION) in str(caught.value)


def test_a_missing_key_is_named(written):
    del written["model"], written["ledger"]
    with pytest.raises(CheckpointError, match=r"model, ledger") as caught:
        CheckpointState.from_dict(written)
    assert caught.value.code == "checkpoint-keys"
    assert caught.value.facts == {"missing": ["model", "ledger"]}
