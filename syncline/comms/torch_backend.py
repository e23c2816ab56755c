"""The `syncline` backend of torch.distributed: gloo, with the frequent collectives in shared memory.

Here: `SynclineGroup`, a process group for scripts that call torch.distributed themselves. Reductions, broadcasts and
gathers of CPU tensors go through memory that the ranks of a host share (`posts.py`). Everything else, and everything
between hosts, goes to a gloo group underneath: point-to-point messages, scatter, all-to-all, sparse tensors, rare
reductions. So whatever works with gloo works with this backend. Not here: `Collective`, with which Syncline's own
strategies exchange (`collective.py`), and who uses this backend in gloo's place (`workers/torchrun.py`).

DDP starts to reduce a bucket in the middle of the backward pass, and needs the result at its end. Here, the start posts
this rank's bucket, and autograd's callback at the end of the pass computes the sum: no thread is needed, and a rank
waits only if another one is later than itself. The sum is in rank order on every rank, so all have the same bits; with
two ranks these are gloo's bits, because a + b = b + a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not export them by name

from syncline.comms.posts import LARGEST_BYTES, Post, Posts, open_posts
from syncline.comms.shared_tensors import SharedMemoryFull
from syncline.comms.torch_group import new_gloo_group

NAME = "syncline"

Tensors = Sequence[torch.Tensor]
_Read = Callable[[int], torch.Tensor]

_OTHERS = (
    # The operations besides SUM that are computed in memory. ReduceOps can only be compared, not hashed.
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)
_DTYPES = frozenset(
    (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
)  # fmt: skip


def register() -> None:
    """Make the backend available as `torch.distributed.init_process_group("syncline")`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SynclineGroup, devices=["cpu"])


_ProcessGroup: Any = dist.ProcessGroup
"""Its methods are overloaded in C++, which no signature here could repeat."""


class SynclineGroup(_ProcessGroup):  # type: ignore[misc]  # for the reason above
    """A process group of torch.distributed. What it does not define itself, torch sends to the gloo group."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store  # torch keeps only the C++ half of a store alive
        self._gloo: Any = new_gloo_group(store, rank, size, timeout)
        self._gloo._set_sequence_number_for_group()
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.posts: Posts | None = open_posts(PrefixStore("posts", store), rank, size, timeout.total_seconds())
        self._refused_bytes = LARGEST_BYTES + 1  # the size of the smallest post for which there was no memory
        self._graph_task = -1  # the backward pass at whose end this group completes its posts

    # The calls of torch.distributed, under the names that torch gives them

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        work: Work | None = None
        if not more and _is_one(tensors) and self._can_share(tensors[0]):
            target, combine = tensors[0], _combination(opts, tensors[0])
            if combine is not None:
                finish = partial(_combine, combine, target, self.size())
                work = self._in_parts("all_reduce", [target], target, finish)
        return work or _work(self._gloo.allreduce(*_given(tensors, opts), **more))

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        work: Work | None = None
        if not more and hasattr(opts, "rootRank") and _is_one(tensors) and self._can_share(tensors[0]):
            target, root = tensors[0], opts.rootRank

            def finish(read: _Read, part: slice) -> None:
                if self.rank() != root:
                    _flat(target)[part].copy_(read(root))

            is_root = self.rank() == root
            work = self._in_parts(f"broadcast from {root}", [target], target, finish, is_source=is_root)
        return work or _work(self._gloo.broadcast(*_given(tensors, opts), **more))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        work: Work | None = None
        targets = outputs[0] if not more and _is_one(outputs) and _is_one(inputs) else []
        if _are_like(targets, self.size(), inputs[0]) and self._can_share(inputs[0], *targets):

            def finish(read: _Read, part: slice) -> None:
                for r, target in enumerate(targets):
                    _flat(target)[part].copy_(read(r))

            work = self._in_parts("all_gather", list(targets), inputs[0], finish)
        return work or _work(self._gloo.allgather(*_given(outputs, inputs, opts), **more))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        work: Work | None = None
        if output.numel() == self.size() * input.numel() and self._can_share(input, output):
            rows = [_flat(row) for row in _flat(output).view(self.size(), input.numel())]

            def finish(read: _Read, part: slice) -> None:
                for r, row in enumerate(rows):
                    row[part].copy_(read(r))

            work = self._in_parts("all_gather_into_tensor", [output], input, finish)
        return work or _work(self._gloo._allgather_base(*_given(output, input, opts)))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        work: Work | None = None
        combine = _combination(opts, input)
        is_even = input.numel() == self.size() * output.numel() and input.nbytes <= LARGEST_BYTES
        if combine is not None and is_even and self._can_share(input, output):
            own = slice(self.rank() * output.numel(), (self.rank() + 1) * output.numel())

            def finish(read: _Read, part: slice) -> None:
                del part  # all of it
                _combine(combine, output, self.size(), lambda r: read(r)[own], slice(None))

            work = self._in_parts("reduce_scatter_tensor", [output], input, finish)
        return work or _work(self._gloo._reduce_scatter_base(*_given(output, input, opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        lists = inputs[0] if not more and _is_one(outputs) and _is_one(inputs) else []
        if _are_like(lists, self.size(), outputs[0]) and self._can_share(outputs[0], *lists):
            return self.reduce_scatter_single(outputs[0], torch.cat([_flat(part) for part in lists]), opts)
        return _work(self._gloo.reduce_scatter(*_given(outputs, inputs, opts), **more))

    def barrier(self, opts: Any = None, **more: Any) -> Work:
        work: Work | None = None
        if self.posts is not None:
            nothing = torch.empty(0)
            work = self._in_parts("barrier", [nothing], nothing, lambda *_: None)
        return work or _work(self._gloo.barrier(*_given(opts), **more))

    # torch 2.12 and earlier use these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def shutdown(self) -> None:
        self.leave()
        self._gloo.shutdown()

    def abort(self) -> None:
        self.leave()
        self._gloo.abort()

    def leave(self) -> None:
        """End the waits of other ranks for this one, which makes no more calls."""
        if self.posts is not None:
            self.posts.leave()

    # How they are carried out

    def _can_share(self, *tensors: torch.Tensor) -> bool:
        """Whether these tensors can pass through shared memory. All ranks find the same."""
        return self.posts is not None and all(
            t.device.type == "cpu" and t.layout == torch.strided and t.is_contiguous() and t.dtype in _DTYPES
            and t.dtype == tensors[0].dtype and min(t.nbytes, LARGEST_BYTES) < self._refused_bytes
            for t in tensors
        )  # fmt: skip

    def _in_parts(
        self,
        what: str,
        results: list[torch.Tensor],
        tensor: torch.Tensor,
        finish: Callable[[_Read, slice], None],
        *,
        is_source: bool = True,
    ) -> Work | None:
        """Post a tensor and have `finish` compute the results; one that is too large for a post, part by part.

        None on every rank if there is not enough memory.
        """
        assert self.posts is not None, "checked by the caller"
        flat, most = _flat(tensor), LARGEST_BYTES // tensor.element_size()
        post: Post | None = None
        for start in range(0, max(flat.numel(), 1), most):
            if post is not None:
                self.posts.complete(post)
            part = slice(start, start + most)
            end = partial(_finish, finish, part)
            try:
                post = self.posts.post(f"{what} of {tensor.dtype}", flat[part], end, is_empty=not is_source)
            except SharedMemoryFull:
                self._refused_bytes = flat[part].nbytes  # the first part is the largest: none was posted
                return None
        assert post is not None, "there is at least one part"
        return PostedWork(self, post, results)

    def complete_after_backward(self) -> bool:
        """Complete all posts at the end of the backward pass that is in progress; False if there is none."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if task != self._graph_task:
            self._graph_task = task
            # torch runs these callbacks in the order in which they were queued. DDP queues its own, which needs the
            # results, after its last call of `allreduce`.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._complete_all)
        return True

    def _complete_all(self) -> None:
        self._graph_task = -1
        if self.posts is not None:
            self.posts.complete_all()


class PostedWork(Work):
    """What a call returns: it is complete once `wait` returns."""

    def __init__(self, group: SynclineGroup, post: Post, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._post, self._results = group, post, results
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the other ranks; the group's own timeout applies."""
        del timeout
        assert self._group.posts is not None, "it has made this post"
        self._group.posts.complete(self._post)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        assert self._group.posts is not None, "it has made this post"
        if self._group.posts.is_ready(self._post):
            self.wait()
        return self._post.is_done

    def is_success(self) -> bool:
        return self._post.is_done and self._post.error is None

    def exception(self) -> BaseException | None:
        return self._post.error

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete at the end of the backward pass; outside of one, now: a future cannot make anyone wait for it."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._post.on_end = self._set_future
            if self._post.is_done:
                self._set_future()
            elif not self._group.complete_after_backward():
                self.wait()
        return self._future

    def _set_future(self) -> None:
        assert self._future is not None, "it was asked for"
        if isinstance(self._post.error, Exception):
            self._future.set_exception(self._post.error)
        else:
            self._future.set_result(self._results)


def _finish(finish: Callable[[_Read, slice], None], part: slice, post: Post) -> None:
    finish(post.read, part)


def _combination(opts: Any, tensor: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """How the operation in `opts` combines two such tensors; None if it is left to gloo."""
    operation = getattr(opts, "reduceOp", None)
    if tensor.dtype == torch.bool:
        return None
    if operation == dist.ReduceOp.SUM:
        return torch.add
    return None if tensor.is_complex() else next((combine for known, combine in _OTHERS if operation == known), None)


def _combine(combine: Callable[..., torch.Tensor], target: torch.Tensor, size: int, read: _Read, part: slice) -> None:
    """Write the combination of all ranks' values into this part of `target`, in rank order."""
    flat = _flat(target)[part]
    if size == 1:
        flat.copy_(read(0))
        return
    combine(read(0), read(1), out=flat)
    for r in range(2, size):
        combine(flat, read(r), out=flat)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Not `detach`, with which autograd would notice the change; it does not with gloo either.
    return tensor.data.view(-1)


def _is_one(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == 1


def _are_like(tensors: Tensors, count: int, like: torch.Tensor) -> bool:
    return len(tensors) == count and all(t.numel() == like.numel() for t in tensors)


def _given(*values: Any) -> tuple[Any, ...]:
    """The values without the options at the end if the caller gave none."""
    return values if values[-1] is not None else values[:-1]


def _work(work: Any) -> Work:
    found: Work = work
    return found


__all__ = ["NAME", "PostedWork", "SharedMemoryFull", "SynclineGroup", "register"]
