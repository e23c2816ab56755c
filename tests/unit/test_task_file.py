"""Objects on their way to the workers: mapped and not copied, by value where they come from the user's script."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from syncline import task_file
from syncline.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
LARGE = 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "task.bin"


def traveled(path: Path, value: object) -> object:
    path.unlink(missing_ok=True)
    task_file.write(path, value)
    return task_file.read(path)


def is_mapped_from(path: Path, address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            return str(path) in line
    return False


@pytest.mark.parametrize("value", [None, 3, "text", b"", [1, (2, {"three": {4}})], float("inf"), b"x" * LARGE])
def test_plain_values_arrive_as_they_were(path, value):
    assert traveled(path, value) == value


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.int64, np.bool_, np.complex64, np.uint16])
@pytest.mark.parametrize("shape", [(0,), (3,), (), (LARGE,), (100, 50, 20)])
def test_arrays_arrive_with_type_shape_and_contents(path, dtype, shape):
    array = (np.arange(int(np.prod(shape))).reshape(shape) % 100).astype(dtype)
    arrived = traveled(path, array)
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    assert np.array_equal(arrived, array)


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
TYPES += [torch.int64, torch.uint8, torch.uint16, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 5, 2 * LARGE])
def test_tensors_of_every_type_arrive(path, dtype, count):
    tensor = torch.arange(count).remainder_(100).to(dtype)
    arrived = traveled(path, tensor)
    assert arrived.dtype == dtype
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8)) if count else arrived.numel() == 0


def test_tensors_of_every_layout_arrive(path):
    base = torch.arange(120_000.0)
    tensors = {
        "transposed": base.view(300, 400).t(),
        "strided": base[::2],
        "expanded": base[:1].expand(50_000),
        "channels last": base.view(10, 3, 40, 100).to(memory_format=torch.channels_last),
        "sparse": torch.eye(50).to_sparse(),
        "conjugated": torch.complex(base, base).conj(),
        "part of a larger one": base[50:60_000],
        "a single number": base[7],
        "nothing in three dimensions": base[:0].view(0, 3, 2),
        "three dimensions": base.view(10, 40, 300).to(torch.bfloat16),
    }
    arrived = traveled(path, tensors)
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name].to_dense(), tensor.to_dense()), name
    assert arrived["channels last"].is_contiguous(memory_format=torch.channels_last)


def test_a_part_of_a_large_tensor_travels_without_the_rest(path):
    task_file.write(path, torch.zeros(10_000_000)[:LARGE])
    assert path.stat().st_size < 5 * LARGE


def test_large_arrays_and_tensors_are_mapped_from_the_file_and_not_copied(path):
    values = (np.ones(LARGE), torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bfloat16))
    array, tensor, brain = traveled(path, values)
    for address in (array.ctypes.data, tensor.data_ptr(), brain.data_ptr()):
        assert is_mapped_from(path, address)
        assert address % 64 == 0


def test_a_models_large_parameters_are_mapped_too(path):
    model = traveled(path, nn.Linear(300, 300))
    assert is_mapped_from(path, model.weight.data_ptr())
    assert model.weight.requires_grad
    assert isinstance(model.weight, nn.Parameter)


def test_writing_to_what_was_read_changes_neither_the_file_nor_other_readers(path):
    task_file.write(path, (np.zeros(LARGE), torch.zeros(LARGE)))
    before = path.read_bytes()
    array, tensor = task_file.read(path)
    array += 1
    tensor.add_(1)
    other_array, other_tensor = task_file.read(path)
    assert path.read_bytes() == before
    assert not other_array.any()
    assert not other_tensor.any()
    assert array.all()
    assert tensor.all()


def test_what_was_read_outlives_the_file(path):
    tensor = traveled(path, torch.ones(LARGE))
    path.unlink()
    assert tensor.sum() == LARGE


def test_tied_tensors_arrive_tied(path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(200, 200)
            self.head = nn.Linear(200, 200, bias=False)
            self.head.weight = self.embedding.weight

    model = traveled(path, Tied())
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    shared = torch.ones(LARGE)
    one, other = traveled(path, (shared, shared))
    assert one is other


def test_a_model_arrives_whole(path):
    model = nn.Sequential(nn.Conv2d(3, 64, 5), nn.BatchNorm2d(64), nn.Flatten(), nn.LazyLinear(10))
    model(torch.randn(2, 3, 32, 32))
    arrived = traveled(path, model)
    assert {k: v.tolist() for k, v in arrived.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }


def test_functions_and_classes_that_exist_only_here_arrive(path):
    factor = 3

    class Scaled:
        def __call__(self, x: int) -> int:
            return factor * x

    scaled, function = traveled(path, (Scaled(), lambda x: factor + x))
    assert scaled(2) == 6
    assert function(2) == 5


def test_classes_of_a_script_travel_by_value(path, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            from syncline import task_file

            FACTOR = 7

            class Squares:
                def __len__(self):
                    return 10
                def __getitem__(self, index):
                    return FACTOR * index ** 2

            Path("runs.txt").open("a").write("x")
            task_file.write(Path(sys.argv[1]), Squares())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, str(script), str(path)], check=True, cwd=tmp_path, env=environment, timeout=60)
    reader = f"""
from pathlib import Path
from syncline import task_file
squares = task_file.read(Path({str(path)!r}))
assert [squares[i] for i in range(len(squares))] == [7 * i ** 2 for i in range(10)]
"""
    subprocess.run([sys.executable, "-c", reader], check=True, cwd=tmp_path, env=environment, timeout=60)
    assert (tmp_path / "runs.txt").read_text() == "x", "the reader ran the script"


def test_what_cannot_travel_is_refused_with_the_way_out(path):
    with path.parent.joinpath("log").open("w") as file:
        for unpicklable, reason in (
            (threading.Lock(), "cannot pickle '_thread.lock' object"),
            (file, "Cannot pickle files"),
        ):
            with pytest.raises(
                ConfigError, match=rf"cannot be sent to the workers: \w+: {reason}.*Open it on first use"
            ):
                task_file.write(path, {"deep": [unpicklable]})
            assert not path.exists()


def test_an_error_in_the_users_own_pickling_is_refused_as_well(path):
    class Stubborn:
        def __reduce__(self) -> str:
            raise OSError("the database is gone")

    with pytest.raises(ConfigError, match="OSError: the database is gone"):
        task_file.write(path, Stubborn())


@pytest.mark.parametrize("contents", [b"", b"x", b"\x80\x05K\x03.", b"SYNCLINE-PAYLOAD-0\n\0" + b"\0" * 100])
def test_a_foreign_file_is_refused(path, contents):
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=r"task\.bin is not a task written by this version of Syncline"):
        task_file.read(path)


def test_a_truncated_file_is_refused_wherever_it_was_cut(path):
    task_file.write(path, (np.ones(LARGE), "text"))
    whole = path.read_bytes()
    for length in (20, 24, 28, 30, 40, 100, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"task\.bin is truncated"):
            task_file.read(path)


def test_only_the_owner_can_read_the_file(path):
    before = os.umask(0)
    try:
        task_file.write(path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another user needs root")
def test_a_file_of_another_user_is_not_loaded(path):
    task_file.write(path, 1)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError) as caught:
        task_file.read(path)
    assert (caught.value.code, caught.value.facts) == ("foreign-run", {"path": str(path), "owner": "12345"})


def test_the_buffers_start_on_aligned_places_whatever_their_lengths(path):
    arrays = [np.arange(n, dtype=np.uint8) for n in (1, 63, 64, 65, 0, mmap.PAGESIZE + 1)]
    for written, read in zip(arrays, traveled(path, arrays), strict=True):
        assert np.array_equal(written, read)
        assert read.ctypes.data % 64 == 0 or read.size == 0
