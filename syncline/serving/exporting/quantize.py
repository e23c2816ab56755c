"""Int8: 8-bit weights and activations, calibrated on training samples.

Here: static quantization of an exported ONNX file in QDQ form (each quantized operator between QuantizeLinear and
DequantizeLinear, which runtimes fuse). Activations are uint8 and weights int8 per channel: without VNNI instructions,
products of two int8 are slower on x86. Dynamic quantization was 2.3 times slower on convolutions. Not here: refusing a
model that got worse (`export.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from syncline.errors import ExportError
from syncline.serving.exporting.onnx_file import save
from syncline.serving.exporting.quiet import quiet
from syncline.serving.metadata import ModelMetadata, TensorFacts, import_onnxruntime
from syncline.serving.trained import TrainedModel

CALIBRATION_SAMPLES = 512
_BATCH = 64
_OPERATORS = (
    "Conv", "Gemm", "MatMul", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Add", "Concat", "Flatten",
    "Reshape", "Transpose",
)  # fmt: skip
"""What a model spends its time on, and what stands between such operators. Softmax and normalization stay exact."""


def quantize(source: Path, path: Path, metadata: ModelMetadata, model: TrainedModel) -> ModelMetadata:
    """Write an int8 version of the ONNX file `source`; its metadata."""
    import_onnxruntime()
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if model.train is None:
        raise ExportError(
            f"int8 is calibrated on training samples, but the training data of {model.name} is not at hand. Export a "
            "run instead of a model that ships with Syncline.",
            code="no-calibration-data", model=model.name,
        )  # fmt: skip
    inputs = metadata.inputs
    with tempfile.TemporaryDirectory(prefix="syncline-int8-") as folder, quiet():
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(source, prepared, skip_symbolic_shape=True)  # folds batch normalization into convolutions
        quantized = Path(folder) / "quantized.onnx"
        quantize_static(
            prepared, quantized, _Calibration(model, inputs), quant_format=QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=list(_OPERATORS), activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )  # fmt: skip
        found = onnx.load(quantized)
    if not any(node.op_type == "QuantizeLinear" for node in found.graph.node):
        raise ExportError(
            f"Nothing in {model.name} can be quantized: it has no convolution and no matrix product with constant "
            "weights. Export it without --int8.",
            code="nothing-to-quantize", model=model.name,
        )  # fmt: skip
    changed = msgspec.structs.replace(metadata, precision="int8")
    save(found, changed, path)
    return changed


class _Calibration:
    """The samples, as the quantizer asks for them."""

    def __init__(self, model: TrainedModel, inputs: tuple[TensorFacts, ...]) -> None:
        self._batches = self._all(model, [one.name for one in inputs])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)

    def _all(self, model: TrainedModel, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        assert model.train is not None
        count = min(CALIBRATION_SAMPLES, len(model.train))
        # Evenly spaced: sorted data would otherwise show some of the classes only.
        chosen = np.linspace(0, len(model.train) - 1, count).round().astype(np.int64)
        for start in range(0, count, _BATCH):
            values = model.train.raw(chosen[start : start + _BATCH])
            yield dict(zip(names, values, strict=True))
