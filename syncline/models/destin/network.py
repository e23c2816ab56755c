"""The network: layers of nodes, from the patches of an image to one node that sees all of it.

Here: `DestinNetwork`, a module that the built-in loop trains like any other. What `backward` puts into `.grad` are the
sums of the mini-batch (`cells.py`, `transitions.py`), so that all that is made for gradients (the all-reduce,
accumulation, checkpoints, recovery) works for them unchanged; `rule.py` has the optimizer that applies them. Not here:
the options by name (`models/zoo/destin.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from syncline.errors import DataError
from syncline.models.destin import cells, transitions
from syncline.models.destin.geometry import Geometry
from syncline.models.destin.rule import ClusterRule

Memory = Literal["none", "table", "recurrent"]
Training = Literal["greedy", "concurrent"]

_ROUNDING = 1e-9  # where a stage ends exactly with a step, 0.4 / 0.8 * 2 must not be a little less than 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the nodes learn and what they remember."""

    clusters: tuple[int, ...]
    """By layer."""
    shared: bool = True
    """Whether the nodes of a layer share their clusters."""
    training: Training = "greedy"
    memory: Memory = "none"
    movements: int = 4
    sharpness: float = 4.0
    rates: cells.Rates = cells.USUAL


class Layer(nn.Module):
    """The clusters of a layer's nodes, and the table of their transitions."""

    def __init__(self, nodes: int, clusters: int, size: int, *, advices: int, shared: bool, center: float) -> None:
        super().__init__()
        self.nodes, self.clusters, self.shared = nodes, clusters, shared
        rows = 1 if shared else nodes
        spread = 0.1 * center if center else 0.1
        self.cells = nn.Parameter(cells.new_cells(rows, clusters, size, center=center, spread=spread))
        self.table = nn.Parameter(transitions.new_table(rows, advices, clusters)) if advices else None

    @property
    def means(self) -> Tensor:
        """[nodes, or 1 if they share clusters; clusters; numbers of an observation]."""
        return cells.parts_of(self.cells.detach()).mean

    def rows(self, values: Tensor) -> Tensor:
        """[samples, nodes, ...] by row of clusters: [rows, observations, ...]."""
        return values.flatten(0, 1).unsqueeze(0) if self.shared else values.transpose(0, 1)

    def samples(self, values: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return values.reshape(-1, self.nodes, *values.shape[2:]) if self.shared else values.transpose(0, 1)


class _Seen(NamedTuple):
    """One layer's part of one view."""

    beliefs: Tensor
    """[samples, nodes, clusters]"""
    error: Tensor
    """[samples]: the mean squared distance of observations to their winners."""


class DestinNetwork(nn.Module):
    """Images to how far observations are from the clusters that win them, per sample; `beliefs` has the features.

    In training, `backward` of the mean over a share of the samples gives sums over that share, divided by its size and
    multiplied by `step_samples`: the weighted sum over workers is then the sum over the step.
    """

    def __init__(self, geometry: Geometry, settings: Settings) -> None:
        super().__init__()
        self.geometry, self.settings = geometry, settings
        self.step_samples = 1
        self.layers = nn.ModuleList()
        counts, sides = settings.clusters, geometry.sides
        for number, (clusters, side) in enumerate(zip(counts, sides, strict=True)):
            parents = counts[number + 1] if number + 1 < len(counts) else 0
            below = geometry.fan_in(number) * counts[number - 1] if number else _numbers_in_patch(geometry)
            own = clusters + parents if settings.memory == "recurrent" else 0
            advices = max(parents, 1) if settings.memory == "table" else 0
            center = 1 / counts[number - 1] if number else 0.0
            self.layers.append(
                Layer(side**2, clusters, below + own, advices=advices, shared=settings.shared, center=center)
            )
        self._enter(None)

    # What the built-in loop calls (`workers/build.py`, `workers/job.py`, `workers/stages.py`)

    def own_optimizer(self) -> torch.optim.Optimizer:
        """The only one that can do anything with the sums."""
        return ClusterRule(self.layers, self.settings.rates)

    def begin_step(self, samples: int) -> None:
        """The next backward passes are for a step of so many samples over all workers."""
        self.step_samples = samples

    def stage_at(self, done: float) -> str:
        """`layer1`, `layer2`, ... in greedy training, then `transitions` if there are any; else `all`."""
        number = self._stage_at(done)
        if number is None:
            return "all"
        return f"layer{number + 1}" if number < len(self.layers) else "transitions"

    def enter_stage(self, done: float) -> None:
        """Set the stage for this fraction of the run."""
        self._enter(self._stage_at(done))

    def _stage_at(self, done: float) -> int | None:
        if self.settings.training == "concurrent":
            return None
        stages = len(self.layers) + (self.settings.memory == "table")
        return min(int(done * stages + _ROUNDING), stages - 1)

    def _enter(self, stage: int | None) -> None:
        everything = range(len(self.layers))
        self._learning = set(everything) if stage is None else {stage} & set(everything)
        self._learns_table = self.settings.memory == "table" and (stage is None or stage == len(self.layers))
        self._depth = len(self.layers) if stage is None else min(stage + 1, len(self.layers))

    # Forward

    def forward(self, images: Tensor) -> Tensor:
        """The error of each sample, over the layers that learn now."""
        if not torch.isfinite(images).all():
            raise DataError(
                f"{int((~torch.isfinite(images)).sum())} of the {images.numel()} numbers of a batch are NaN or "
                "infinite, and one of them would make a cluster NaN for good. Replace them, or leave out these "
                "samples.",
                code="non-finite-input",
                count=int((~torch.isfinite(images)).sum()),
            )
        sums: dict[nn.Parameter, Tensor] = {}
        is_learning = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            errors = [error for _, error in self._watch(images.double(), sums if is_learning else None)]
            error = torch.stack(errors).mean(0)  # float64, so that the weights of samples in its gradient are
        if not is_learning:
            return error
        return _Learned.apply(error, self.step_samples, list(sums.values()), *sums)  # type: ignore[no-untyped-call, no-any-return]  # torch's own

    @torch.no_grad()
    def beliefs(self, images: Tensor) -> Tensor:
        """The beliefs of all nodes, lowest layer first, as the mean over the movements: [samples, features]."""
        total: Tensor | None = None
        for seen, _ in self._watch(images.float(), None):  # half the time; nothing is learned from these
            now = torch.cat([layer.flatten(1) for layer in seen], 1)
            total = now if total is None else total + now
        assert total is not None, "there is at least one view"
        return (total / self.settings.movements).to(images.dtype)

    def _watch(self, images: Tensor, sums: dict[nn.Parameter, Tensor] | None) -> Any:
        """For each view of the images the beliefs of each layer, and the error; `sums` gets what is to be learned."""
        before: list[Tensor] | None = None
        for view in self.geometry.views(images, self.settings.movements):
            observed = self.geometry.patches(view)
            beliefs: list[Tensor] = []
            errors: list[Tensor] = []
            for number in range(self._depth):
                if number:
                    observed = self.geometry.children(beliefs[-1], number)
                seen = self._see(number, observed, before, sums)
                beliefs.append(seen.beliefs)
                if number in self._learning or not self._learning:
                    errors.append(seen.error)
            yield beliefs, torch.stack(errors).mean(0)
            before = beliefs if self.settings.memory != "none" else None

    def _see(
        self, number: int, observed: Tensor, before: list[Tensor] | None, sums: dict[nn.Parameter, Tensor] | None
    ) -> _Seen:
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        if self.settings.memory == "recurrent":
            observed = self._with_context(number, observed, before)
        rows, own_cells = layer.rows(observed), layer.cells.to(observed.dtype)
        chosen, distances = cells.winners(rows, own_cells)
        error = layer.samples(distances).mean(1) / rows.shape[-1]
        if sums is not None and number in self._learning:
            _add(sums, layer.cells, cells.sums_of(rows, chosen, layer.clusters))
        weights = cells.likelihoods(rows, own_cells, self.settings.sharpness)
        if layer.table is not None and before is not None:
            own, advice = layer.rows(before[number]), layer.rows(self._advice(number, before))
            weights = weights * transitions.expected(layer.table.to(own.dtype), advice, own)
        beliefs = cells.normalized(weights)
        if layer.table is not None and before is not None and sums is not None and self._learns_table:
            states = cells.states_of(own), cells.states_of(beliefs)
            _add(sums, layer.table, transitions.counted(layer.table, advice, *states))
        return _Seen(layer.samples(beliefs), error)

    def _advice(self, number: int, before: list[Tensor]) -> Tensor:
        """The state of each node's parent, [samples, nodes]; always 0 for a node without one."""
        if number + 1 >= len(before):
            return before[number].new_zeros(before[number].shape[:2], dtype=torch.int64)
        return self.geometry.of_parents(cells.states_of(before[number + 1]), number)

    def _with_context(self, number: int, observed: Tensor, before: list[Tensor] | None) -> Tensor:
        """The observation with the node's own belief and its parent's, of the view before."""
        counts = self.settings.clusters
        if before is None:
            context = [observed.new_full((*observed.shape[:2], k), 1 / k) for k in counts[number : number + 2]]
        else:
            context = [before[number]]
            context += [self.geometry.of_parents(above, number) for above in before[number + 1 : number + 2]]
        return torch.cat([observed, *context], -1)


class _Learned(torch.autograd.Function):
    """The error as it is; in `backward`, sums take the place of gradients."""

    @staticmethod
    def forward(ctx: Any, error: Tensor, step_samples: int, sums: list[Tensor], *_parameters: Tensor) -> Tensor:
        ctx.step_samples, ctx.sums = step_samples, sums
        return error.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The loss is a mean over samples, so that the gradient of each is the weight that samples have in it."""
        weight = gradients[0].mean() * ctx.step_samples
        return None, None, None, *(total * weight for total in ctx.sums)


def _add(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, more: Tensor) -> None:
    sums[parameter] = sums[parameter] + more if parameter in sums else more


def _numbers_in_patch(geometry: Geometry) -> int:
    height, width = geometry.patch
    return geometry.shape[0] * height * width


def feature_sizes(network: DestinNetwork) -> list[int]:
    """How many features each layer has, in the order of `beliefs`."""
    return [side**2 * k for side, k in zip(network.geometry.sides, network.settings.clusters, strict=True)]


def feature_slices(network: DestinNetwork) -> list[slice]:
    """Where each layer's features are."""
    ends = list(itertools.accumulate(feature_sizes(network), initial=0))
    return [slice(low, high) for low, high in itertools.pairwise(ends)]
