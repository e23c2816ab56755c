"""The published ways to keep workers in agreement, each as one point in the space of strategies.

A new one is a new entry here. Free of torch, so that a strategy is checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.algorithms.outer import block_momentum, nesterov
from syncline.strategies.how import Int8, OneBit
from syncline.strategies.strategy import Strategy
from syncline.strategies.what import Gradients, Updates
from syncline.strategies.when import Every

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True)
class Preset:
    """A strategy by name, after a published system."""

    name: str
    after: str
    paper: str
    make: Callable[..., Strategy]


def _allreduce() -> Strategy:
    return Strategy(what=Gradients(), when=Every(1))


def _onebit() -> Strategy:
    return Strategy(what=Gradients(), when=Every(1), how=OneBit())


def _sparknet(tau: int = 10) -> Strategy:
    return Strategy(what=Updates(), when=Every(tau))


def _iterative_reduce(steps: int = 5) -> Strategy:
    return Strategy(what=Updates(optimizer_state=True), when=Every(steps))


def _bmuf(steps: int = 10, momentum: float = 0.5, lr: float = 1.0, nesterov: bool = True) -> Strategy:
    return Strategy(what=Updates(outer=block_momentum(momentum, lr, nesterov)), when=Every(steps))


def _diloco(steps: int = 50, lr: float = 0.7, momentum: float = 0.9) -> Strategy:
    return Strategy(what=Updates(outer=nesterov(lr, momentum)), when=Every(steps), how=Int8())


PRESETS: dict[str, Preset] = {
    preset.name.replace("-", "_"): preset
    for preset in (
        Preset(
            "allreduce",
            "ChainerMN, CaffeOnSpark, CNTK, Caffe2, Horovod, PyTorch DDP",
            "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020",
            _allreduce,
        ),
        Preset(
            "onebit",
            "CNTK 1-bit SGD",
            "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training "
            "of Speech DNNs, Interspeech 2014",
            _onebit,
        ),
        Preset(
            "sparknet",
            "SparkNet",
            "Moritz et al., SparkNet: Training Deep Networks in Spark, ICLR 2016",
            _sparknet,
        ),
        Preset(
            "iterative-reduce",
            "Deeplearning4j",
            "Eclipse Deeplearning4j: parameter averaging with updater state",
            _iterative_reduce,
        ),
        Preset(
            "bmuf",
            "CNTK block momentum",
            "Chen & Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block "
            "Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016",
            _bmuf,
        ),
        Preset(
            "diloco",
            "DiLoCo",
            "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv:2311.08105",
            _diloco,
        ),
    )
}
"""By name, with underscores for dashes."""
