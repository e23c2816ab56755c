"""Tensors that the ranks of one host post for each other to read, without waiting until they are read.

Here: `Posts`: the memory, and the posts of this rank that it has not completed yet. To post is to copy a tensor into
memory that all ranks map. To complete a post is to wait until every rank has made the same one, and to compute a result
from all of them. So a rank can post a gradient in the middle of its backward pass, continue, and complete the post at
the end, when the other ranks have posted theirs as well. Not here: who has made and read what (`post_counters.py`), and
the collective calls built on this (`torch_backend.py`).

All ranks make the same posts in the same order, as torch.distributed demands, so each of them knows where the others'
lie: one after the other in a ring, which every rank has. The ring grows on demand to twice the largest post. Ranks find
each other through a store of torch.distributed.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import DistStoreError

from syncline.comms.post_counters import DESCRIPTIONS, PostCounters
from syncline.comms.segment import Segment, machine_here, memory_available, why_not_supported
from syncline.comms.shared_tensors import SharedMemoryFull

LARGEST_BYTES = 32 * 1024 * 1024
"""The largest post. DDP's largest buckets have 25 MiB unless a single parameter is larger."""
_LEAST_RING_BYTES = 1024 * 1024
_ALIGN_BYTES = 64
_SPIN_S = 100e-6
_CHECK_S = 1.0
"""How often a rank that waits for another one's memory checks whether that one is still there."""
_MEMORY_PART = 4
"""All rings together take no more than this part of the memory that is free: a fourth."""

_names: dict[int, str] = {}


class Post:
    """A post of this rank, and what to do when all ranks have made it. `read(rank)` gives a rank's tensor."""

    def __init__(self, number: int, posted: list[torch.Tensor], what: int, finish: Callable[[Post], None]) -> None:
        self.number, self._posted, self.what, self.finish = number, posted, what, finish
        self.is_done = False
        self.error: BaseException | None = None
        self.on_end: Callable[[], None] | None = None
        """Called when this post is done or has failed."""

    def read(self, rank: int) -> torch.Tensor:
        """What a rank has posted; valid in `finish`."""
        return self._posted[rank]

    @property
    def size_bytes(self) -> int:
        return self._posted[0].nbytes

    def end(self, error: BaseException | None = None) -> None:
        self.is_done, self.error = True, error
        self._posted = []
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


class Posts:
    """The posts of one rank; one thread at a time may use it."""

    def __init__(self, store: Any, control: Segment, rank: int, pids: list[int], timeout_s: float) -> None:
        self.rank, self.size = rank, len(pids)
        # Spinning pays only while every rank has a core to itself.
        spin_s = _SPIN_S if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self._counters = PostCounters(control.memory, rank, pids, spin_s=spin_s, timeout_s=timeout_s)
        self._store, self._made = store, 0
        self._pending: deque[Post] = deque()
        self._ring: Segment | None = None
        self._ring_bytes, self._rings, self._offset = 0, 0, 0
        self._unread: deque[tuple[int, int, int]] = deque()  # number, start and end of what others may still read
        self._error = ""
        self._has_left = False

    def post(self, what: str, tensor: torch.Tensor, finish: Callable[[Post], None], *, is_empty: bool = False) -> Post:
        """Post a flat tensor; with `is_empty`, only take part with one of this size.

        `SharedMemoryFull` on every rank if there is no room for it.
        """
        self._check()
        number = self._made + 1
        start = self._take_room(tensor.nbytes, number)
        posted = [self._at(r, start, tensor) for r in range(self.size)]
        if not is_empty:
            posted[self.rank].copy_(tensor)
        code = code_of(what)
        self._made = number
        self._counters.mark_made(number, code, tensor.nbytes)
        post = Post(number, posted, code, finish)
        self._pending.append(post)
        return post

    def complete(self, post: Post) -> None:
        """Wait for the other ranks' posts, and finish this one and those before it."""
        while not post.is_done:
            self._complete_first()
        if post.error is not None:
            raise post.error

    def complete_all(self) -> None:
        while self._pending:
            self._complete_first()

    def is_ready(self, post: Post) -> bool:
        """Whether `complete` would not wait."""
        return post.is_done or self._counters.have_made(post.number)

    def leave(self) -> None:
        """The other ranks shall not wait for this one any more."""
        if not self._has_left:
            self._has_left = True
            self._counters.leave()
            self._error = "This rank has left the process group."
            self._ring = None

    def _complete_first(self) -> None:
        post = self._pending[0]
        try:
            self._check()
            self._counters.await_made(post.number)
            self._check_same(post)
            post.finish(post)
        except BaseException as error:
            if isinstance(error, RuntimeError):  # not a KeyboardInterrupt
                self._error = f"An earlier call of this process group has failed: {error}"
            self._pending.popleft()
            post.end(error)
            raise
        self._pending.popleft()
        self._counters.mark_read(post.number)
        post.end()

    def _check(self) -> None:
        if self._error:
            raise RuntimeError(self._error)

    def _check_same(self, post: Post) -> None:
        mine = (post.what, post.size_bytes)
        for r in range(self.size):
            theirs = self._counters.description(r, post.number)
            if theirs != mine:
                raise RuntimeError(
                    f"The ranks made different calls: rank {self.rank} {_describe(*mine)}, rank {r} "
                    f"{_describe(*theirs)}. All ranks must make the same calls in the same order."
                )

    def _at(self, rank: int, start: int, like: torch.Tensor) -> torch.Tensor:
        if not like.numel():
            return torch.empty(0, dtype=like.dtype)  # torch refuses an empty part of a buffer
        assert self._ring is not None, "room was taken in it"
        offset = rank * self._ring_bytes + start
        return torch.frombuffer(self._ring.memory, dtype=like.dtype, count=like.numel(), offset=offset)

    def _take_room(self, size_bytes: int, number: int) -> int:
        """Where post `number` lies in the rings, once no rank needs what was there."""
        size_bytes = -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if 2 * size_bytes > self._ring_bytes:
            self._grow(size_bytes)
        if self._offset + size_bytes > self._ring_bytes:
            self._offset = 0
        start, end = self._offset, self._offset + size_bytes
        self._offset = end
        latest = max((n for n, low, high in self._unread if low < end and start < high), default=0)
        self._let_read(max(latest, number - DESCRIPTIONS))
        self._unread.append((number, start, end))
        return start

    def _let_read(self, number: int) -> None:
        """Wait until no rank needs the posts up to `number` any more."""
        if not self._unread or self._unread[0][0] > number:
            return
        while self._pending and self._pending[0].number <= number:
            self._complete_first()
        self._counters.await_read(number)
        while self._unread and self._unread[0][0] <= number:
            self._unread.popleft()

    def _await_key(self, key: str) -> None:
        """Wait for a key in the store, or until the rank that should set it has ended."""
        while True:
            try:
                self._store.wait([key], timedelta(seconds=_CHECK_S))
                return
            except DistStoreError:
                self._counters.check_others()

    def _grow(self, size_bytes: int) -> None:
        """Replace the rings by larger ones; posts in the old ones are completed first."""
        self.complete_all()
        self._counters.await_read(self._made)
        needed = max(_LEAST_RING_BYTES, 1 << (2 * size_bytes - 1).bit_length())
        self._rings += 1
        name = f"ring-{self._rings}"
        self._ring = shared_segment(self._store, name, self.rank, self.size, needed * self.size, self._await_key)
        self._ring_bytes, self._offset = needed, 0
        self._unread.clear()


def open_posts(store: Any, rank: int, size: int, timeout_s: float) -> Posts | None:
    """The posts of a group whose ranks all call this with the same `store`; None if they do not share one host."""
    here = "" if why_not_supported() else machine_here()
    store.set(f"host-{rank}", f"{os.getpid()} {here}")
    found = [store.get(f"host-{r}").decode().split(" ", 1) for r in range(size)]
    if size == 1 or not here or {name for _, name in found} != {here}:
        return None
    try:
        control = shared_segment(store, "control", rank, size, PostCounters.bytes_needed(size))
    except SharedMemoryFull:
        return None
    return Posts(store, control, rank, [int(pid) for pid, _ in found], timeout_s)


def shared_segment(
    store: Any, name: str, rank: int, size: int, size_bytes: int, wait: Callable[[str], None] = lambda _: None
) -> Segment:
    """Memory that rank 0 creates and all ranks attach; `SharedMemoryFull` on every rank if one of them cannot.

    `wait` is called with each key before it is read.
    """

    def get(key: str) -> str:
        wait(key)
        value: bytes = store.get(key)
        return value.decode()

    segment: Segment | None = None
    problem = ""
    try:
        try:
            if rank == 0:
                if size_bytes > memory_available() // _MEMORY_PART:
                    raise OSError(f"{size_bytes / 1e6:.0f} MB needed, {memory_available() / 1e6:.0f} MB free")
                segment = Segment.create(size_bytes, "syncline-posts")
                store.set(name, segment.address)
            else:
                address = get(name)
                if address.startswith("!"):
                    raise OSError(address[1:])
                segment = Segment.attach(address)
        except OSError as error:
            problem = f"!{error}"
            if rank == 0:
                store.set(name, problem)
        store.set(f"{name}-{rank}", problem or "attached")
        outcomes = [get(f"{name}-{r}") for r in range(size)]
    finally:
        if segment is not None:
            segment.close_descriptor()
    failed = next((text[1:] for text in outcomes if text.startswith("!")), None)
    if failed is not None or segment is None:
        raise SharedMemoryFull(failed or "no memory")
    return segment


@cache
def code_of(what: str) -> int:
    """A number for the purpose of a post, the same in all processes."""
    code = zlib.crc32(what.encode())
    _names[code] = what
    return code


def _describe(what: int, size_bytes: int) -> str:
    return f"{_names.get(what, 'another call')} of {size_bytes} bytes"
