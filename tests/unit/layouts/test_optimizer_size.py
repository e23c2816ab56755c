"""How much memory an optimizer's state takes."""

import torch
from torch import nn

from syncline.layouts.layout import Layout
from syncline.layouts.optimizer_size import optimizer_state
from syncline.workers.own_loop.optimizer import OptimizerGroup


def test_several_optimizers_of_a_loop_are_counted_without_a_step():
    weight = nn.Parameter(torch.ones(3))
    several = OptimizerGroup([torch.optim.AdamW([weight]), torch.optim.AdamW([nn.Parameter(torch.ones(2))])])
    assert optimizer_state(several) == 2  # type: ignore[arg-type]
    assert weight.tolist() == [1, 1, 1]


def test_a_model_that_each_worker_holds_whole_has_no_part_and_its_optimizer_is_not_tried():
    def tried() -> float:
        raise AssertionError("a user's optimizer may have side effects")

    assert Layout().held_part(object(), tried) is None  # type: ignore[arg-type]
