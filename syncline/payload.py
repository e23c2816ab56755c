"""A Python object in a file, so that many processes can load it without each holding a copy of its arrays.

Here: writing and reading. Tensors and arrays lie in the file as they are in memory; a reader maps them copy on
write. Classes and functions of the user's script travel by value (cloudpickle), so that no worker runs the script.

Reading executes code that the file names: a payload is read only by the processes of the run that wrote it, and, on
`resume`, by the same user (`read` checks the owner).
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from syncline.errors import ConfigError

__all__ = ["read", "write"]

_MAGIC = b"SYNCLINE-PAYLOAD-1\n\0"
_ALIGN = 64


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _can_lie_in_file(obj, torch):
            # As bytes, since NumPy lacks some of torch's types, and torch's own pickling fails for others.
            as_bytes = obj.detach().reshape(-1).view(torch.uint8).numpy()
            return _tensor_of, (as_bytes, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _can_lie_in_file(tensor: Any, torch: Any) -> bool:
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
    import torch  # who reads no tensors needs no torch

    return torch.from_numpy(as_bytes).view(dtype).view(shape)


def write(path: Path, value: Any) -> None:
    """Put `value` into a file that only this user can read; `ConfigError` if it cannot travel."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        raise ConfigError(
            f"The task cannot be sent to the workers: {type(error).__name__}: {error}. Something in it cannot be "
            "pickled, such as an open file, a lock or a database connection. Open it on first use inside the Dataset, "
            "or pass a function that makes the object (data=lambda: MyDataset(...))."
        ) from error
    parts = [stream.getbuffer(), *(b.raw() for b in buffers)]
    sizes = struct.pack(f"<Q{len(parts)}Q", len(parts), *(p.nbytes for p in parts))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_MAGIC + sizes)
        for part in parts:
            file.write(b"\0" * (-file.tell() % _ALIGN))
            file.write(part)


def read(path: Path) -> Any:
    """The value in a payload file."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):
            raise ConfigError(f"{path} belongs to another user; loading it could run their code as yours.")
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{path} is not a task written by this version of Syncline.")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    try:
        (count,) = struct.unpack_from("<Q", data, len(_MAGIC))
        sizes = struct.unpack_from(f"<{count}Q", data, len(_MAGIC) + 8)
    except struct.error:
        raise ConfigError(_truncated(path)) from None
    offset = len(_MAGIC) + 8 + 8 * count
    parts = []
    for size in sizes:
        offset += -offset % _ALIGN
        parts.append(data[offset : offset + size])
        offset += size
    if offset > len(data):
        raise ConfigError(_truncated(path))
    return pickle.loads(parts[0], buffers=parts[1:])


def _truncated(path: Path) -> str:
    return f"{path} is truncated: whoever wrote it did not come to the end. Start the run anew."
