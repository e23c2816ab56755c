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
from pathlib import Path
from typing import Any

import cloudpickle

from syncline.config.owned_files import create_new, open_owned
from syncline.errors import ConfigError

_MAGIC = b"SYNCLINE-TASK-1\n\0"
_ALIGN = 64


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
    sizes = struct.pack(f"<Q{len(parts)}Q", len(parts), *(p.nbytes for p in parts))
    with create_new(path, 0o600) as file:
        file.write(_MAGIC + sizes)
        for part in parts:
            file.write(b"\0" * (-file.tell() % _ALIGN))
            file.write(part)


def read(path: Path) -> Any:
    """The value in a task file; `ConfigError` if it is not ours."""
    with open_owned(path) as file:
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
    return f"{path} is truncated, because it was not written to the end. Start the run again."
