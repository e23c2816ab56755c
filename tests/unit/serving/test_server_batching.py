"""`Batcher`: where a request runs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from syncline.serving.server.batching import ON_LOOP_S, Batcher
from syncline.serving.server.signature import Signature, TensorSpec
from syncline.serving.server.tuning import Tuned

ROW_S = ON_LOOP_S / 10


class Notes:
    """Notes the size of each run, and whether it was on the main thread."""

    platform, metadata, shares_batch_dimension = "test", None, True
    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))

    def __init__(self) -> None:
        self.runs = []

    def run(self, tensors):
        self.runs.append((len(tensors["x"]), threading.current_thread() is threading.main_thread()))
        return [tensors["x"]]


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_large_request_to_a_quick_model_does_not_block_the_loop(max_batch):
    async def ask() -> list:
        engine, loop = Notes(), asyncio.get_running_loop()
        answered = [loop.create_future() for _ in range(3)]
        with ThreadPoolExecutor(1) as thread:
            batcher = Batcher(Tuned(engine, 1, ROW_S, ROW_S * max_batch, max_batch, True), loop, thread)
            for rows, future in zip((1, 100, 3), answered, strict=True):
                batcher.submit({"x": np.zeros((rows, 2), np.float32)}, future.set_result)
            outputs = await asyncio.gather(*answered)
        assert [len(one["y"]) for one in outputs] == [1, 100, 3]
        assert batcher.is_idle
        return engine.runs

    assert asyncio.run(ask()) == [(1, True), (100, False), (3, True)]
