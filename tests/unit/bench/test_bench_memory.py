"""The comparison of memory: which batches are measured, and that a step tells its peak."""

from __future__ import annotations

import pytest

from syncline.bench import memory
from syncline.bench.harness import Settings, measure


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, object]]:
    """Steps that need 1 GB and 10 MB for a sample; what was asked for."""
    asked: list[tuple[int, object]] = []

    def peak_mb(batch: int, settings: object) -> float:
        asked.append((batch, settings))
        return 1000.0 + 10.0 * batch

    monkeypatch.setattr(memory, "_peak_mb", peak_mb)
    return asked


def measured(settings: Settings) -> list[str]:
    names = []
    for suite in memory.suites(settings):
        measure(suite, 3)
        names.append(suite.name)
    return names


def test_batches_that_do_not_fit_are_left_out_and_told(peaks, monkeypatch):
    monkeypatch.setattr(memory, "memory_available", lambda: 5_000 * 10**6)
    said: list[str] = []
    assert measured(Settings(say=said.append)) == ["memory-32", "memory-64", "memory-128", "memory-256"]
    assert said == [
        "A batch of 512 is left out: it needs about 6,120 MB, and 4,000 are free.",
        "A batch of 1024 is left out: it needs about 11,240 MB, and 4,000 are free.",
    ]


def test_each_figure_is_taken_once(peaks, monkeypatch):
    monkeypatch.setattr(memory, "memory_available", lambda: 10**12)
    assert measured(Settings(quick=True)) == ["memory-32", "memory-64"]
    ways = [None, {}, {"checkpoint_activations": True}, {"memory_limit": "1500MB"}]
    assert peaks == [(batch, way) for batch in (32, 64) for way in ways]


@pytest.mark.parametrize("settings", [None, {}])
def test_a_real_step_tells_its_peak(settings):
    assert 300 < memory._peak_mb(1 if settings is None else 2, settings) < 3000
