"""`sharded` in a user's own loop: all workers of a host hold one model together, and divide its updates.

Parameters and what the optimizer remembers lie in memory that all workers map, once for all of them. Gradients are
whole on each worker, because a script may look at them and change them before `optimizer.step()`: they are summed as
without this layout. Then each worker updates an equal part of the numbers (`loop_optimizer.py`).

    begin_update    a barrier: all workers have the sum, and none of them computes with the parameters any more
    update          each worker updates its part
    end_update      a barrier: all parts are updated before any script continues

A step counts when all have reached the first barrier. If a worker dies before, nothing has changed, and the others
repeat the exchange as equal replicas do. If one dies after, the survivors have made their parts, and one of them makes
the rest (`finish_updates`): all still have the sum. Then they continue in their scripts.

What a script does to parameters itself would be done once by each worker, to the same memory: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch import nn

from syncline.comms.collective import Collective
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.layouts.loop_optimizer import LoopOptimizer, OptimizerOffer, check_optimizer, refusal
from syncline.strategies.exchange import LocalExchange, Replica
from syncline.strategies.flat import FlatParameters, views_of
from syncline.strategies.method import Method

_WATCHED = 64
"""How many numbers of each parameter are watched for changes by the script."""


class OwnLoopShards(LocalExchange):
    """An `Exchange`: sum gradients as `method` does, update one's own part of the shared parameters."""

    def __init__(self, replica: Replica, method: Method) -> None:
        super().__init__(replica, method)
        self._sums = method.exchange(replica)
        self._parameters: list[nn.Parameter] = list(replica.gradients.parameters)
        self._shared_bytes = 0
        self._is_updating = self._is_shared = False
        self._watch: _Watch | None = None

    def begin(self) -> None:
        """Move the parameters of rank 0, and what its optimizer remembers, into shared memory."""
        self._broadcast_others()
        flat, collective = FlatParameters(self._parameters, what="--layout sharded"), self.replica.collective
        memory = self._allocate(flat.numel, flat.dtype)
        if collective.rank == 0:
            flat.read(memory)
        self._optimizer = LoopOptimizer(
            self.replica.optimizer,
            self._parameters,
            memory,
            rank=collective.rank,
            size=collective.size,
            offers=self._gather_offers(),
            allocate=self._allocate,
        )
        collective.barrier()
        flat.move_to(memory)
        self._optimizer.confirm()
        self._is_shared = True
        self._watch = _Watch(self._parameters, memory)

    def _broadcast_others(self) -> None:
        """Give all workers what this optimizer does not update, unless they have it: buffers, other parameters."""
        if self.replica.is_settled:
            return
        own, model = set(map(id, self._parameters)), self.replica.model
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in own:
                # By `data`, whose version is its own: another optimizer's exchange may watch that of the parameter.
                self.replica.collective.broadcast_(tensor.data)

    def _gather_offers(self) -> list[OptimizerOffer]:
        mine = msgspec.msgpack.encode(OptimizerOffer.of(self.replica.optimizer, self._parameters))
        return [msgspec.msgpack.decode(part, type=OptimizerOffer) for part in self.replica.collective.all_gather(mine)]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._shared_bytes += numel * dtype.itemsize
        try:
            return self.replica.collective.allocate_shared(numel, dtype)
        except SharedMemoryFull as error:
            why = f"the model does not fit into shared memory ({error}); --shared-memory-limit-mb sets its size"
            raise refusal(why, "shared-memory") from error

    def bytes_of_others(self) -> int:
        """How much of the shared memory is not this worker's part of it."""
        size = self.replica.collective.size
        return self._shared_bytes * (size - 1) // size

    def before_update(self, weight: float) -> bool:
        return self._sums.before_update(weight)

    def begin_update(self) -> None:
        self._check_script()
        self._optimizer.begin_update()
        self.replica.collective.barrier()
        self._is_updating = True

    def update(self) -> None:
        self._optimizer.update()

    def end_update(self) -> None:
        self.replica.collective.barrier()
        self._end_update()

    def _end_update(self) -> None:
        self._is_updating = False
        # The pieces that were updated count their versions by themselves: autograd must see that parameters changed.
        torch.autograd.graph.increment_version(self._parameters)
        if self._watch is not None:
            self._watch.renew()

    @property
    def is_complete(self) -> bool:
        return not self._is_updating

    def finish_updates(self, survivors: Collective) -> None:
        """Complete the update of those that died in it. All survivors have reached the same barriers."""
        if not self._is_updating:
            return
        survivors.barrier()
        if survivors.rank == 0:
            self._optimizer.complete_others()
        survivors.barrier()
        self._end_update()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """All workers hold the whole model and its whole state; none updates before all have left."""
        if self._is_shared:
            self._check_changes()
        yield

    def leave(self, module: nn.Module) -> None:
        """The script loads other parameters: let it do so in memory of its own. It cannot train them any more."""
        own = set(map(id, self._parameters))
        is_mine = any(id(p) in own for p in module.parameters())
        if is_mine and self._is_shared and self._watch is not None and not self._watch.is_moved:
            self._is_shared = False
            for p in self._parameters:
                p.data = p.detach().clone()

    def close(self) -> None:
        """Parameters stay in the memory of this View until the next one moves them; no other worker changes it then."""
        self._is_shared = False
        self._sums.close()

    def _check_script(self) -> None:
        """Refuse what the script has done since the last update, if it would be different with this layout."""
        if not self._is_shared:
            raise refusal("the script has loaded parameters after the training had begun", "parameters-loaded")
        self._check_changes()
        self._optimizer.find_groups()
        if not self._optimizer.is_intact:
            raise refusal("the script has replaced the optimizer's state after the training had begun", "state-loaded")
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters):
            raise refusal("some gradients are sparse, and a part of such a gradient cannot be updated", "sparse")

    def _check_changes(self) -> None:
        assert self._watch is not None, "it has begun"
        if self._watch.is_moved or self._watch.is_changed:
            why = (
                "the script changes parameters without optimizer.step(); all workers hold them together, so each would "
                "make the change once more"
            )
            raise refusal(why, "parameters-changed")


class _Watch:
    """Notices that a script has changed parameters, which lie in `memory`.

    By their address and version; for changes of `.data`, which has no version, by some numbers of each.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memory: torch.Tensor) -> None:
        self._parameters = parameters
        self._addresses = [view.data_ptr() for view in views_of(memory, parameters)]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[memory.dtype.itemsize]
        self._bits = memory.view(bits)
        starts, places = 0, []
        for p in parameters:
            count = p.numel()
            places.append(starts + torch.arange(min(_WATCHED, count)) * count // max(1, min(_WATCHED, count)))
            starts += count
        self._places = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
        self.renew()

    def renew(self) -> None:
        """What the parameters are now is right."""
        self._versions = [p._version for p in self._parameters]
        self._numbers = self._bits.index_select(0, self._places)

    @property
    def is_moved(self) -> bool:
        return [p.data_ptr() for p in self._parameters] != self._addresses

    @property
    def is_changed(self) -> bool:
        if [p._version for p in self._parameters] != self._versions:
            return True
        return not torch.equal(self._bits.index_select(0, self._places), self._numbers)


def check_loop(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """`ConfigError` if a script with these optimizers cannot have this layout."""
    seen: set[int] = set()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dtypes = {p.dtype for p in parameters}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise refusal(f"parameters must be of one floating-point type, and these are {names}", "dtypes")
        if seen & set(map(id, parameters)):
            raise refusal("two optimizers have the same parameters", "shared-parameters")
        seen.update(map(id, parameters))
        check_optimizer(optimizer)
