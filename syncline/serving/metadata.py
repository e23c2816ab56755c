"""What an exported model says about itself, so that a program can use it without torch and without the run.

Here: `ModelMetadata`, and how an ONNX file carries it: one JSON text among its `metadata_props`. Not here: making the
file (`exporting/`). Reading it needs onnxruntime only.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import msgspec

from syncline.errors import ConfigError, ExportError

if TYPE_CHECKING:
    import onnxruntime

__all__ = [
    "InputKind",
    "ModelMetadata",
    "TensorFacts",
    "import_onnxruntime",
    "metadata_of",
    "open_session",
    "read_metadata",
    "require",
]

KEY = "syncline"
"""The key of the JSON text in the file's metadata."""
FORMAT = 1

InputKind = Literal["image", "table", "text", "tensor"]
"""Images (channels, height, width), rows of numbers, tokens, or anything else."""


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An input or an output."""

    name: str
    dtype: str
    """As NumPy calls it: float32, uint8, int64."""
    shape: tuple[int, ...]
    """Of one sample, without the batch; -1 where it varies."""


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a server, a scorer or a page needs to know of a model.

    Attributes:
        name: Such as `lenet`.
        version: The step of its checkpoint, or 1.
        sha256: Of its weights.
        kind: What an input is.
        inputs: What to pass, in order. An image of type uint8 holds pixels from 0 to 255: scaling is in the graph.
        outputs: What comes back, in order.
        answers: What the main output means: `classes`, `binary logits`, `binary`, `number` or `numbers`.
        class_names: In the order of the outputs; also the characters of a text model, by token.
        columns: The input columns, for a table.
        scale: The (mean, std) that the graph applies to bytes; None if it takes inputs as they are.
        is_handwriting: Whether images are light ink on dark, centered by mass.
        precision: Of the weights and the arithmetic.
        data: The name of the training data.
        producer: The Syncline that wrote it.
        format: The version of these fields.
    """

    name: str
    version: str
    sha256: str
    kind: InputKind
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    answers: str
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    scale: tuple[float, float] | None = None
    is_handwriting: bool = False
    precision: Literal["float32", "int8"] = "float32"
    data: str = ""
    producer: str = ""
    format: int = FORMAT

    @property
    def output_names(self) -> list[str]:
        return [output.name for output in self.outputs]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def read_metadata(path: str | Path) -> ModelMetadata:
    """The metadata of an exported ONNX file; `ExportError` if it has none, as a file from elsewhere."""
    return metadata_of(open_session(path), str(path))


def metadata_of(session: onnxruntime.InferenceSession, shown: str) -> ModelMetadata:
    """The metadata of a model that is loaded already; `shown` names it in an error."""
    text = session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise ExportError(
            f"{shown} was not exported by Syncline: it has no metadata. Export the run again: syncline export RUN",
            code="no-metadata", path=shown,
        )  # fmt: skip
    try:
        found = msgspec.json.decode(text, type=ModelMetadata)
    except msgspec.DecodeError as error:
        raise ExportError(
            f"The metadata of {shown} cannot be read: {error}. Export the run again with this Syncline.",
            code="bad-metadata", path=shown,
        ) from error  # fmt: skip
    if found.format != FORMAT:
        raise ExportError(
            f"The metadata of {shown} has format {found.format}, but this Syncline reads format {FORMAT}.",
            code="bad-metadata", path=shown, format=found.format,
        )  # fmt: skip
    return found


def open_session(path: str | Path, *, threads: int = 0, content: bytes | None = None) -> onnxruntime.InferenceSession:
    """The model in ONNX Runtime on the CPU; `threads` inside an operator, 0 for as many as there are cores.

    With `content`, the file at `path` is not read: it is on another machine.
    """
    onnxruntime = import_onnxruntime()
    if content is None and not Path(path).is_file():
        raise ConfigError(f"There is no file {path}.", code="no-model-file", path=str(path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # only errors
    # Spinning threads take the cores that other processes need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(content or str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a type for each status, and no common one
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(
            f"{path} cannot be loaded by ONNX Runtime: {said}", code="not-onnx", path=str(path)
        ) from error


def import_onnxruntime() -> ModuleType:
    """The package, with its reports to its vendor turned off: they begin on import, unless this variable is set."""
    require("onnxruntime", "Running an ONNX file")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    module: ModuleType = onnxruntime
    return module


def require(package: str, purpose: str) -> None:
    """`ConfigError` that says what to install, if a package of the extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'syncline[serve]'",
            code="missing-package", package=package,
        )  # fmt: skip
