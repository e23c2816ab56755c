"""The comparison of memory: which batches are measured, and that a step tells its peak."""

from __future__ import annotations

import re

import pytest

from syncline.lab.bench import memory
from syncline.lab.bench.harness import BenchSettings, measure


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, object]]:
    """Steps that need 1 GB and 10 MB for a sample; what was asked for."""
    asked: list[tuple[int, object]] = []

    def peak_mb(batch: int, settings: object) -> float:
        asked.append((batch, settings))
        return 1000.0 + 10.0 * batch

    monkeypatch.setattr(memory, "_peak_mb", peak_mb)
    return asked


def measured(settings: BenchSettings) -> list[str]:
    names = []
    for suite in memory.suites(settings):
        measure(suite, 3)
        names.append(suite.name)
    return names


def test_batches_that_do_not_fit_are_skipped_and_reported(peaks, monkeypatch):
    monkeypatch.setattr(memory, "memory_available", lambda: 5_000 * 10**6)
    said: list[str] = []
    assert measured(BenchSettings(say=said.append)) == ["memory-32", "memory-64", "memory-128", "memory-256"]
    first, second = said
    assert re.search(r"512.*6,120 MB.*4,000 MB", first)
    assert re.search(r"1024.*11,240 MB.*4,000 MB", second)


def test_each_figure_is_measured_once(peaks, monkeypatch):
    monkeypatch.setattr(memory, "memory_available", lambda: 10**12)
    assert measured(BenchSettings(quick=True)) == ["memory-32", "memory-64"]
    methods = [None, {}, {"checkpoint_activations": True}, {"memory_limit": "1500MB"}]
    assert peaks == [(batch, method) for batch in (32, 64) for method in methods]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [None, {}])
def test_a_real_step_prints_its_peak(settings):
    assert 300 < memory._peak_mb(1 if settings is None else 2, settings) < 3000
