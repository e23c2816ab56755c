"""Batch normalization over the global batch, so that n workers compute what one process would.

Here: `synchronize_batch_norm`, which makes the BatchNorm layers of a model share their statistics,
`take_part_without_samples`, for a worker whose share of a batch is empty, and `recompute_contexts`, for layers that are
recomputed (`recompute.py`). Not here: the all-reduce itself (`comms`), how a global batch is divided (`data`), and how
gradients are combined afterwards (`strategies`). torch's own `SyncBatchNorm` refuses CPU tensors, hence this one.

Notation (Ioffe & Szegedy, 2015), for one channel:

    r             a worker; it holds n_r of the N samples of the global batch, and m_r of the m values
    w_r           its share n_r / N
    x_i, y_i      input and output at position i;  y_i = gamma * xhat_i + beta
    mu, var       mean and biased variance of all m values;  xhat_i = (x_i - mu) / sigma,  sigma = sqrt(var + eps)

**Forward.** Worker r knows its own mean mu_r and variance var_r. By Chan, Golub & LeVeque (1979)

    mu  = sum_r (m_r / m) mu_r
    var = sum_r (m_r / m) (var_r + (mu_r - mu)^2)

which, unlike E[x^2] - mu^2, subtracts nothing large. It needs every (m_r, mu_r, var_r) rather than one sum of them,
so each worker writes its own row of a table of zeros, and the table is summed: one call, and exact, because adding
zeros loses nothing. Every rank then has the same bits, so running statistics stay equal on all workers.

**Backward.** One process would minimize L, the mean over N samples. Worker r calls backward on L_r, the mean over its
own n_r samples; L = sum_r w_r L_r, and the gradients are later combined with the same weights. Let everything that
flows backward in worker r be in its own scale, d_r v = (1 / w_r) dL/dv: at the loss this is what autograd starts
with, and layers that treat samples separately keep the scale. Batch normalization mixes samples. In one process

    dL/dx_i = (gamma / sigma) (dL/dy_i - (1/m) sum_j dL/dy_j - xhat_i (1/m) sum_j dL/dy_j xhat_j)

where j ranges over the values of all workers. With dL/dy_j = w_s d_s y_j for j in worker s,

    S_1 = sum_s w_s sum_{j in s} d_s y_j,        S_2 = sum_s w_s sum_{j in s} d_s y_j xhat_j

and division by w_r, back to the scale of worker r, gives

    d_r x_i = (gamma / sigma) (d_r y_i - (S_1 + xhat_i S_2) / (w_r m))

S_1 and S_2 are one weighted `all_reduce_`. (If all samples have one size, w_r m = m_r.) Parameters need no exchange:
the local sums of d_r y_j xhat_j and d_r y_j, combined with the weights w_r, are dL/dgamma and dL/dbeta.

The share w_r is read from the first dimension of the layer's input. So a model may fold other dimensions into the
batch, or use every sample twice, as long as it does the same with all samples.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncline.errors import ConfigError

if TYPE_CHECKING:
    from syncline.comms.collective import Collective


class StatisticsExchange(Protocol):
    """How layers exchange their statistics with the other workers."""

    def table_of(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all workers, this one's `row` among them."""

    def sum_of(self, sums: torch.Tensor, weight: float) -> torch.Tensor:
        """The sum over all workers of `weight * sums`; may overwrite `sums`."""


class CollectiveStatistics:
    """A `StatisticsExchange` that calls a collective, and raises what it raises."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def table_of(self, row: torch.Tensor) -> torch.Tensor:
        """One `all_reduce_` of a table with a row for each worker."""
        table = torch.zeros(self._collective.size, len(row), dtype=row.dtype, device=row.device)
        table[self._collective.rank] = row
        self._collective.all_reduce_(table)
        return table

    def sum_of(self, sums: torch.Tensor, weight: float) -> torch.Tensor:
        self._collective.all_reduce_(sums, weight)
        return sums


def synchronize_batch_norm(
    model: nn.Module, collective: Collective, statistics: StatisticsExchange | None = None
) -> nn.Module:
    """Make every BatchNorm layer of `model` train with the statistics of the global batch; returns `model`.

    They are exchanged through `statistics`, by default with the collective itself. Given that, a worker that is alone
    keeps the layers connected, too: a user's own loop records what it has exchanged, and a replacement that repeats a
    round finds one value on record for each of its layers, also if the others were fewer in the middle of that round.

    The layers are changed in place: parameters, buffers, hooks and `state_dict` keys stay the same objects, so an
    optimizer made before keeps working. Calling it again with another collective (a new View) connects the layers
    to that one; with a collective of one worker and without `statistics` they are torch's own again. In evaluation
    mode they always are.

    From then on each training forward and each backward of a layer is a collective call: every worker must run the
    model equally often, those without samples inside `take_part_without_samples`. Pickled layers are torch's own;
    copies made by `copy.deepcopy` stay connected. Second derivatives are not available.
    """
    exchange = statistics or (CollectiveStatistics(collective) if collective.size > 1 else None)
    for number, (name, module) in enumerate(model.named_modules(), start=1):
        if isinstance(module, _GlobalBatchNorm):
            module.connect(exchange, number)
        elif isinstance(module, _BatchNorm) and exchange is not None:
            _check_convertible(name, module)
            module.__class__ = _global_class(type(module))  # type: ignore[arg-type]  # mypy finds classes unhashable
            assert isinstance(module, _GlobalBatchNorm)
            module.connect(exchange, number)
    return model


def has_global_batch_norm(model: nn.Module) -> bool:
    """Whether a training step of `model` needs every worker, because its layers exchange statistics."""
    return any(isinstance(module, _GlobalBatchNorm) for module in model.modules())


@contextmanager
def take_part_without_samples(model: nn.Module) -> Iterator[None]:
    """Make a worker whose share is empty take part in its peers' exchanges without contributing.

        with take_part_without_samples(model):
            loss(model(inputs), targets).backward()   # on any one sample; the result is discarded
        # all gradients are zero now

    The peers' collective calls follow the order in which they run their layers forward and backward. In general only
    running the same model and loss repeats that order, so this worker does so with any sample: the layers do not count
    its values, and its gradients are zeroed at the end. An input of shape (0, ...) would have the same effect, but much
    code cannot handle one (`x.view(x.size(0), -1)` raises, a mean is NaN), whereas every model can handle one sample.
    Metrics and buffers of the model itself do see the sample.

    Only models with global batch normalization need this: see `has_global_batch_norm`.
    """
    layers = [module for module in model.modules() if isinstance(module, _GlobalBatchNorm)]
    for layer in layers:
        layer.counts_samples = False
    try:
        yield
    finally:
        for layer in layers:
            layer.counts_samples = True
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()  # not `= None`: a gradient may be a view of the strategy's buffer


def recompute_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for computing the layers of `block`, and for recomputing them with the same input.

    Recomputing reuses the global statistics, without a collective call.
    """
    layers = [module for module in block.modules() if isinstance(module, _GlobalBatchNorm)]
    found: list[list[_Statistics]] = [[] for _ in layers]

    @contextmanager
    def first() -> Iterator[None]:
        for layer, kept in zip(layers, found, strict=True):
            layer.found = kept
        try:
            yield
        finally:
            for layer in layers:
                del layer.found

    @contextmanager
    def again() -> Iterator[None]:
        for layer, kept in zip(layers, found, strict=True):
            layer.known = iter(kept)
        try:
            yield
        finally:
            for layer in layers:
                del layer.known

    return first(), again()


_CONNECTION = ("exchange", "number", "counts_samples")
"""The attributes that a connected layer has, and torch's own has not."""


class _Statistics(NamedTuple):
    """The global batch as one layer sees it, and this worker's share of it."""

    mean: torch.Tensor
    variance: torch.Tensor  # biased
    values: float  # m, in each channel
    share: float  # w_r


class _GlobalBatchNorm(_BatchNorm):
    """The training mode of a connected layer. Instances get this class by assignment; see `_global_class`."""

    plain_class: type[_BatchNorm]
    exchange: StatisticsExchange
    number: int
    """Its place in the model, from 1: all workers must be in the same layer when they exchange."""
    counts_samples: bool
    found: list[_Statistics]
    """Where to store the statistics for recomputing, if the layer is recomputed."""
    known: Iterator[_Statistics]
    """The stored statistics, while the layer is recomputed."""

    def connect(self, exchange: StatisticsExchange | None, number: int) -> None:
        """Exchange statistics through `exchange`, or become torch's own layer again without one."""
        if exchange is not None:
            self.exchange, self.number = exchange, number
            self.counts_samples = True
        else:
            del self.exchange, self.number, self.counts_samples
            self.__class__ = self.plain_class  # type: ignore[assignment]  # the class it was made with

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name is torch's
        """Normalize with the statistics of the global batch when training, else as torch does."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        statistics = next(self.known) if "known" in self.__dict__ else self._find_statistics(input)
        output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            input, self.weight, self.bias, statistics, self.eps, self.exchange
        )
        return output

    def _find_statistics(self, input: torch.Tensor) -> _Statistics:
        """Compute the statistics together with the other workers."""
        dtype = _statistics_dtype(input, self.weight, self.bias)
        statistics = _global_statistics(input.detach(), dtype, self.counts_samples, self.exchange, self.number)
        if self.track_running_stats and statistics.values:
            _track(self, statistics)
        if "found" in self.__dict__:
            self.found.append(statistics)
        return statistics

    def __deepcopy__(self, memo: dict[int, Any]) -> _GlobalBatchNorm:
        """A copy on the same collective, which itself cannot be copied: it is a connection."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.exchange)] = self.exchange
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[type[_BatchNorm]], dict[str, Any]]:
        """Pickle as torch's own layer: a connection has no meaning in another process."""
        del protocol
        state = {key: value for key, value in self.__dict__.items() if key not in _CONNECTION}
        return _new, (self.plain_class,), state


@torch.no_grad()
def _track(layer: _BatchNorm, statistics: _Statistics) -> None:
    """Update the running statistics by `momentum`, or, if that is None, as a cumulative average."""
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    if layer.running_mean is None or layer.running_var is None:
        return
    assert factor is not None, "torch counts batches wherever it keeps running statistics"
    unbiased = statistics.variance * (statistics.values / (statistics.values - 1.0))
    layer.running_mean.lerp_(statistics.mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), factor)


@functools.cache
def _global_class(plain: type[_BatchNorm]) -> type[_GlobalBatchNorm]:
    """A subclass of `plain` with the global training mode, so that users' subclasses keep their behavior."""
    names = {"plain_class": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_GlobalBatchNorm, plain), names)


def _new(plain: type[_BatchNorm]) -> _BatchNorm:
    """An empty layer for unpickling, which then restores its state."""
    return plain.__new__(plain)


def _check_convertible(name: str, module: _BatchNorm) -> None:
    kind = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ConfigError(
            f"Layer {name!r} is a {kind} without an initialized size, so it cannot be synchronized between workers. "
            "Run the model once on one batch before training, or give the layer its num_features.",
            code="lazy-batch-norm",
            layer=name,
        )
    if type(module).forward is not _BatchNorm.forward:
        raise ConfigError(
            f"Layer {name!r} is a {kind}, a batch normalization with a custom forward, so Syncline cannot synchronize "
            "its statistics, and several workers would compute something else than one. Use nn.BatchNorm1d, 2d or 3d, "
            "or set batch_norm to 'local' to normalize each worker's share separately.",
            code="custom-batch-norm",
            layer=name,
        )


def _statistics_dtype(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.dtype:
    """What torch's kernels require: the dtype of the parameters, which may be wider than the input's."""
    for parameter in (weight, bias):
        if parameter is not None:
            return parameter.dtype
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def _global_statistics(
    x: torch.Tensor, dtype: torch.dtype, counts_samples: bool, exchange: StatisticsExchange, layer: int
) -> _Statistics:
    """Mean and variance of each channel over all workers, from a table with a row for each of them."""
    channels = x.shape[1]
    # At least single precision: the table also holds counts, which half precision cannot.
    table_dtype = torch.promote_types(dtype, torch.float32)
    row = torch.zeros(3 + 2 * channels, dtype=table_dtype, device=x.device)
    row[-1] = layer
    own_samples = 0
    if counts_samples and x.numel() > 0:
        # The kernel also updates running statistics; given some of a wider type than x, it computes in that type.
        scratch = None if dtype == x.dtype else torch.zeros(channels, dtype=dtype, device=x.device)
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, scratch, scratch, 0.0)
        own_samples = x.shape[0]
        row[0] = own_samples
        row[1] = x.numel() // channels
        row[2 : 2 + channels] = mean
        row[2 + channels : -1] = variance
    table = exchange.table_of(row)
    _check_layers(table[:, -1], layer)
    samples, count = table[:, :2].sum(0).tolist()
    if count == 0 and not counts_samples:
        # The workers that held the samples have failed in the middle of the step: its results do not count.
        zeros = torch.zeros(channels, dtype=dtype, device=x.device)
        return _Statistics(zeros, torch.ones_like(zeros), values=0, share=0)
    if count <= 1:
        raise ConfigError(
            f"All {len(table)} workers together have {count:g} value(s) per channel of a batch normalization "
            f"(this worker's input has shape {tuple(x.shape)}), but a variance needs at least two. Use a global batch "
            "of 2 samples or more, also at the end of an epoch.",
            code="batch-norm-values",
            values=count,
        )
    fraction = table[:, 1:2] / count
    means, variances = table[:, 2:-1].chunk(2, dim=1)
    mean = (fraction * means).sum(0)
    variance = (fraction * (variances + (means - mean).square())).sum(0)
    share = own_samples / samples
    return _Statistics(mean.to(dtype), variance.to(dtype), count, share)


def _check_layers(found: torch.Tensor, layer: int) -> None:
    """Refuse to mix the statistics of different layers."""
    if bool((found == layer).all()):
        return
    raise ConfigError(
        "Workers are out of step: they exchange the statistics of different batch-norm layers. Some of them ran a "
        "forward pass in training mode that others did not, for instance on a condition that only they met. Run it on "
        "all workers or in model.eval(); conditions on counters must use worker.step or worker.batch.",
        code="out-of-step",
    )


class _Normalize(torch.autograd.Function):
    """y = gamma * xhat + beta, with the backward derived at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
        exchange: StatisticsExchange,
    ) -> torch.Tensor:
        """Torch's evaluation kernel with the statistics of the global batch."""
        mean, variance = statistics.mean, statistics.variance
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.values, ctx.share = statistics.values, statistics.share
        ctx.eps, ctx.exchange = eps, exchange
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Local sums, one exchange if the input needs a gradient, and d_r x as one linear combination of dy and x."""
        x, weight, mean, variance = ctx.saved_tensors
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)  # the kernels are much faster on one common layout
        if x.numel() > 0:
            _, dy_xhat, dy_sum = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:  # the kernel divides by the number of samples, and the process would die of SIGFPE
            dy_xhat, dy_sum = torch.zeros_like(mean), torch.zeros_like(mean)

        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(ctx, dy, x, weight, mean, variance, torch.stack((dy_sum, dy_xhat)))
        return (
            dx,
            dy_xhat if ctx.needs_input_grad[1] else None,
            dy_sum if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _input_gradient(
    ctx: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    local_sums: torch.Tensor,
) -> torch.Tensor:
    share: float = ctx.share
    eps: float = ctx.eps
    sums = local_sums.to(torch.promote_types(local_sums.dtype, torch.float32))
    if share == 0.0:
        sums.zero_()  # a weight of zero would let NaN through
    sums = ctx.exchange.sum_of(sums, share)

    inverse_sigma = (variance + eps).rsqrt()
    scale = inverse_sigma if weight is None else weight * inverse_sigma
    by_channel = (1, -1) + (1,) * (x.dim() - 2)
    if share == 0.0:
        return dy * scale.view(by_channel).to(x.dtype)  # empty, or from a sample that does not count
    s1, s2 = (sums / (share * ctx.values)).to(scale.dtype)
    # scale * (dy - s1 - xhat * s2), rearranged as (offset + x * slope) + dy * scale: two passes over memory.
    slope = -scale * s2 * inverse_sigma
    offset = -scale * s1 - slope * mean
    dx = torch.addcmul(offset.view(by_channel), x, slope.view(by_channel))
    return dx.addcmul_(dy, scale.view(by_channel)).to(x.dtype)
