"""The published ways to keep workers in agreement, each as one point in the space of strategies.

A new one is a new entry here. Free of torch, so that a strategy is checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.compute.outer import block_momentum, elastic, nesterov
from syncline.config.spec import Spec
from syncline.strategies.hierarchy import Hierarchy
from syncline.strategies.how import Exact, Int8, OneBit, TopK
from syncline.strategies.strategy import Strategy
from syncline.strategies.what import Gradients, Models, Updates
from syncline.strategies.when import Async, Every, Layerwise, Stale
from syncline.strategies.whom import Memory, Neighbors, Rivals, Server


@dataclass(frozen=True)
class Preset:
    """A strategy by name, after a published system."""

    name: str
    after: str
    paper: str
    make: Callable[..., Strategy | Hierarchy]


def _allreduce() -> Strategy:
    return Strategy(what=Gradients(), when=Every(1))


def _server_sync(shards: int = 1) -> Strategy:
    return Strategy(what=Gradients(), when=Every(1), whom=Server(shards))


def _server_async(shards: int = 1) -> Strategy:
    return Strategy(what=Gradients(), when=Async(), whom=Server(shards))


def _downpour(push: int = 2, fetch: int = 2, shards: int = 1, lr: float = 0.01) -> Strategy:
    # DistBelief's servers step with Adagrad, whose rates differ from parameter to parameter and so bear old gradients.
    # Sums that start from zero would make its first steps as long as the rate, however small the gradient.
    adagrad = Spec("Adagrad", {"lr": lr, "initial_accumulator_value": 0.01})
    return Strategy(what=Gradients(), when=Async(push, fetch), whom=Server(shards, optimizer=adagrad))


def _ssp(bound: int = 3, shards: int = 1) -> Strategy:
    return Strategy(what=Gradients(), when=Stale(bound), whom=Server(shards))


def _sparknet(tau: int = 10) -> Strategy:
    return Strategy(what=Updates(), when=Every(tau))


def _iterative_reduce(steps: int = 5) -> Strategy:
    return Strategy(what=Updates(optimizer_state=True), when=Every(steps))


def _hogwild() -> Strategy:
    return Strategy(what=Gradients(), when=Async(), whom=Memory())


def _h2o(steps: int = 5, group: int = 2) -> Hierarchy:
    return Hierarchy(inside_host=_hogwild(), across_hosts=Strategy(what=Updates(), when=Every(steps)), group=group)


def _onebit() -> Strategy:
    return Strategy(what=Gradients(), when=Every(1), how=OneBit())


def _bmuf(steps: int = 10, momentum: float = 0.5, lr: float = 1.0, nesterov: bool = True) -> Strategy:
    return Strategy(what=Updates(outer=block_momentum(momentum, lr, nesterov)), when=Every(steps))


def _easgd(tau: int = 10, rate: float = 0.225, shards: int = 1) -> Strategy:
    # The paper's beta = 0.9, shared out among 4 workers.
    return Strategy(what=Updates(outer=elastic(rate)), when=Every(tau), whom=Server(shards))


def _nexus(fraction: float | None = None, largest: int = 2, shards: int = 1) -> Strategy:
    return Strategy(
        what=Gradients(),
        when=Layerwise(largest=largest),
        whom=Server(shards),
        how=Exact() if fraction is None else TopK(fraction),
    )


def _gossip(topology: str = "exponential", asynchronous: bool = False) -> Strategy:
    return Strategy(what=Updates(), when=Async() if asynchronous else Every(1), whom=Neighbors(topology))


def _ltfb(steps: int = 100, perturb: float | None = None) -> Strategy:
    return Strategy(what=Models(perturb=perturb), when=Every(steps), whom=Rivals())


def _diloco(steps: int = 50, lr: float = 0.7, momentum: float = 0.7) -> Strategy:
    # The paper's momentum of 0.9 goes with AdamW inside. With a worker's own momentum inside, as here by default, the
    # two momenta together overshoot: 0.9 made LeNet's loss infinite within an epoch, 0.7 does not.
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
            "server-sync",
            "MXNet dist_sync, TensorFlow sync replicas",
            "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
            _server_sync,
        ),
        Preset(
            "server-async",
            "MXNet dist_async, TensorFlow async, DeepDist",
            "Chen et al., MXNet: A Flexible and Efficient Machine Learning Library for Heterogeneous Distributed "
            "Systems, LearningSys at NIPS 2015",
            _server_async,
        ),
        Preset(
            "downpour",
            "DistBelief, Arimo's TensorFlow on Spark",
            "Dean et al., Large Scale Distributed Deep Networks, NIPS 2012",
            _downpour,
        ),
        Preset(
            "ssp",
            "Petuum",
            "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013",
            _ssp,
        ),
        Preset(
            "sparknet",
            "SparkNet",
            "Moritz, Nishihara, Stoica & Jordan, SparkNet: Training Deep Networks in Spark, ICLR 2016",
            _sparknet,
        ),
        Preset(
            "iterative-reduce",
            "Deeplearning4j",
            "Eclipse Deeplearning4j, Distributed Training: parameter averaging with updater state, manual 2016",
            _iterative_reduce,
        ),
        Preset(
            "hogwild",
            "Hogwild!, PyTorch",
            "Recht, Ré, Wright & Niu, Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, "
            "NIPS 2011",
            _hogwild,
        ),
        Preset(
            "h2o",
            "H2O",
            "Candel, Parmar, LeDell & Arora, Deep Learning with H2O, H2O.ai 2015",
            _h2o,
        ),
        Preset(
            "onebit",
            "CNTK 1-bit SGD",
            "Seide, Fu, Droppo, Li & Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel "
            "Distributed Training of Speech DNNs, Interspeech 2014",
            _onebit,
        ),
        Preset(
            "bmuf",
            "CNTK block momentum",
            "Chen & Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block "
            "Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016",
            _bmuf,
        ),
        Preset(
            "easgd",
            "Theano-MPI",
            "Zhang, Choromanska & LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015",
            _easgd,
        ),
        Preset(
            "nexus",
            "Nexus",
            "Wang, Zhang, Ren & Zhang, Nexus: Bringing Efficient and Scalable Training to Deep Learning Frameworks, "
            "MASCOTS 2017",
            _nexus,
        ),
        Preset(
            "gossip",
            "AD-PSGD, GossipGraD",
            "Lian, Zhang, Zhang & Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018",
            _gossip,
        ),
        Preset(
            "ltfb",
            "Livermore LTFB",
            "Jacobs, Dryden, Pearce & Van Essen, Towards Scalable Parallel Training of Deep Neural Networks, "
            "MLHPC at SC 2017",
            _ltfb,
        ),
        Preset(
            "diloco",
            "DiLoCo",
            "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv:2311.08105, "
            "2023",
            _diloco,
        ),
    )
}
"""By name, with underscores for dashes."""
