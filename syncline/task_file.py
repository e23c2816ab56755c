"""The task file of a run: the task, pickled so that many processes can load it without copying its arrays.

Here: writing and reading. Tensors and arrays are stored raw, and readers map them copy-on-write. Classes and functions
of the user's script are pickled by value (cloudpickle), so that no worker runs the script.

Reading can execute code, as with any pickle. So `read` follows no link, and refuses a file that another user owns or
can write, or that is in such a directory.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from syncline.config.owned_files import create_new, open_owned
from syncline.errors import ConfigError

_MAGIC = b"SYNCLINE-TASK-2\n\0"
_ALIGN = 64
_LARGEST_CHECKED_BYTES = 256 * 1024 * 1024


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _can_be_mapped(obj, torch):
            # As bytes, since NumPy lacks some of torch's types, and torch's own pickling fails for others.
            as_bytes = obj.detach().reshape(-1).view(torch.uint8).numpy()
            return _tensor_of, (as_bytes, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _can_be_mapped(tensor: Any, torch: Any) -> bool:
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _tensor_of(as_bytes: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch  # only if there are tensors

    return torch.from_numpy(as_bytes).view(dtype).view(shape)


def write(path: Path, value: Any) -> None:
    """Write `value` to a new file that only this user can read; `ConfigError` if it cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        raise ConfigError(
            f"The task cannot be sent to the workers: {type(error).__name__}: {error}. Some object in it cannot be "
            "pickled, such as an open file, a lock or a database connection. Open it on first use in the Dataset, or "
            "pass a function that returns the object (data=lambda: MyDataset(...))."
        ) from error
    parts = [stream.getbuffer(), *(b.raw() for b in buffers)]
    sizes = struct.pack(f"<QQ{len(parts)}Q", _checksum(parts), len(parts), *(p.nbytes for p in parts))
    with create_new(path, 0o600) as file:
        file.write(_MAGIC + sizes)
        for part in parts:
            file.write(b"\0" * (-file.tell() % _ALIGN))
            file.write(part)


def read(path: Path) -> Any:
    """The value in a task file that this run has written; `ConfigError` if it is not ours."""
    parts, _ = _parts_of(path)
    return pickle.loads(parts[0], buffers=parts[1:])


def read_saved(path: Path) -> Any:
    """The value in the task file of an earlier run; `ConfigError` if the file was damaged since, or code is missing."""
    parts, checksum = _parts_of(path)
    if _checksum(parts) != checksum:
        raise ConfigError(
            f"{path} is damaged: its checksum does not match. Run the same script again with resume set to its folder, "
            "or start a new run.",
            code="damaged-task",
            path=str(path),
        )
    try:
        return pickle.loads(parts[0], buffers=parts[1:])
    except Exception as error:
        is_import = isinstance(error, ImportError)
        fix = "Install it, or add its folder to PYTHONPATH." if is_import else "Resume with the versions that wrote it."
        raise ConfigError(
            f"The task in {path} cannot be loaded: {type(error).__name__}: {error}. {fix}",
            code="unloadable-task",
            path=str(path),
        ) from error


def _parts_of(path: Path) -> tuple[list[memoryview], int]:
    """The pickle and its buffers, mapped, and the checksum that they should have."""
    with open_owned(path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(
                f"{path} is not a task written by this version of Syncline.", code="not-a-task", path=str(path)
            )
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    try:
        checksum, count = struct.unpack_from("<QQ", data, len(_MAGIC))
        if not 0 < count <= len(data) // 8:
            raise _truncated(path)
        sizes = struct.unpack_from(f"<{count}Q", data, len(_MAGIC) + 16)
    except struct.error:
        raise _truncated(path) from None
    offset = len(_MAGIC) + 16 + 8 * count
    parts = []
    for size in sizes:
        offset += -offset % _ALIGN
        parts.append(data[offset : offset + size])
        offset += size
    if offset > len(data):
        raise _truncated(path)
    return parts, checksum


def _checksum(parts: Sequence[memoryview]) -> int:
    if sum(part.nbytes for part in parts) > _LARGEST_CHECKED_BYTES:
        return 0  # it would take seconds, and so large a task is not kept with the run
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _truncated(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is truncated, because it was not written to the end. Start the run again.",
        code="truncated-task",
        path=str(path),
    )
