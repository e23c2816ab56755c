"""What a machine offers, read without loading torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from syncline.planning import machine
from syncline.planning.machine import visible_gpus


@pytest.fixture
def four_gpus(monkeypatch, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libtorch_cuda.so"
    library.parent.mkdir()
    library.touch()
    torch = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(machine, "find_spec", lambda name: torch)
    monkeypatch.setattr(machine, "_gpus_of_the_driver", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("allowed", "visible"),
    [
        (None, ["0", "1", "2", "3"]), ("2,0", ["2", "0"]), ("", []), ("-1", []), ("1,-1,2", ["1"]), ("7", []),
        ("GPU-8932f937, GPU-1", ["GPU-8932f937", "GPU-1"]),
    ],
)  # fmt: skip
def test_gpus_are_those_that_cuda_would_show_to_torch(allowed, visible):
    assert visible_gpus({} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}) == visible


@pytest.mark.usefixtures("four_gpus")
def test_a_torch_built_for_the_cpu_sees_no_gpu(monkeypatch, tmp_path):
    (tmp_path / "lib" / "libtorch_cuda.so").unlink()
    assert visible_gpus({}) == []
