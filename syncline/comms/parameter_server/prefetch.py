"""Fetching parameters in the background, on a thread and connections of its own.

Here: `ParameterPrefetcher`. Not here: when to prefetch (strategies), and waiting for this worker's pushes (the server
delays a `Pull` until push `after` is applied).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.comms.parameter_server import messages as m
from syncline.comms.parameter_server.channel import Channel, await_replies


class ParameterPrefetcher:
    """One fetch at a time, from all shards; `numels` is how many values each shard has."""

    def __init__(self, channels: Sequence[Channel], numels: Sequence[int]) -> None:
        self._channels = channels
        self.fetched = [_destination(channel, numel) for channel, numel in zip(channels, numels, strict=True)]
        """Each shard's values, after `take` has returned replies."""
        self._changed = threading.Condition()
        self._wanted: list[int] | None = None
        self._replies: list[m.Reply] = []
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="syncline-prefetch", daemon=True)
        self._thread.start()

    def start(self, after: list[int]) -> None:
        """Fetch once each shard has applied its request `after`. Does nothing while a fetch is in progress."""
        with self._changed:
            if self._wanted is None:
                self._wanted, self._replies = after, []
                self._changed.notify_all()

    def take(self, timeout_s: float) -> list[m.Reply]:
        """The replies of a completed fetch, once; empty if there is none within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is None, timeout_s)
            if self._failure is not None:
                raise self._failure
            replies, self._replies = self._replies, []
            return replies

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for channel in self._channels:
            channel.connection.interrupt()  # wakes the thread if it waits for a reply
        self._thread.join()
        for channel in self._channels:
            channel.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_closed)
                if self._is_closed:
                    return
                after = self._wanted
                assert after is not None
            try:
                replies = self._fetch(after)
            except BaseException as failure:
                with self._changed:
                    self._wanted, self._failure = None, failure
                    self._changed.notify_all()
                return
            with self._changed:
                self._wanted, self._replies = None, replies
                self._changed.notify_all()

    def _fetch(self, after: list[int]) -> list[m.Reply]:
        ids = []
        for channel, last, fetched in zip(self._channels, after, self.fetched, strict=True):
            # With a shared buffer, the server writes straight into `fetched`.
            id_ = channel.expect(None if channel.connection.shared_buffer is not None else [fetched])
            channel.connection.send(m.Pull(id_, last, None))
            ids.append(id_)
        return await_replies(self._channels, ids)


def _destination(channel: Channel, numel: int) -> Tensor:
    buffer = channel.connection.shared_buffer
    return torch.empty(numel) if buffer is None else buffer.bytes[: 4 * numel].view(torch.float32)
