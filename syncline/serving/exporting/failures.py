"""From an exporter's exception to an error that names the operator and says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from syncline.errors import ExportError, SynclineError

_OPERATOR = re.compile(r"OpOverload\(op='([\w.]+)'|\b(?:torch\.ops\.)?((?:aten|prims|torchvision|\w+_ops)(?:\.|::)\w+)")

_ADVICE = {
    "operator": "Replace it in the model by other operators, or export with --format torch, which needs no conversion.",
    "data-dependent": "The model branches on the values of its inputs, which a graph cannot. Use torch.where or "
    "torch.cond instead of 'if' on tensor values.",
    "batch": "The model works only for the number of samples that it was traced with. Take the batch from "
    "x.shape[0] or use -1 in view and reshape; do not use len(x) or a constant.",
    "other": "Run the model on a batch by hand to see whether it works outside of training, or export with "
    "--format torch.",
}


def explain(error: BaseException, what: str) -> ExportError | SynclineError:
    """The error for a failed export."""
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, SynclineError):
            return cause
    text = "\n".join(f"{type(cause).__name__}: {cause}" for cause in chain)
    code, operator = _classify(text)
    subject = f"The operator {operator} has no equivalent in {what.upper()}" if operator else "The exporter failed"
    return ExportError(
        f"This model cannot be exported to {what}. {subject}: {_first_line(chain[-1])} {_ADVICE[code]}",
        code=f"export-{code}" if code != "other" else "export-failed", operator=operator, format=what,
    )  # fmt: skip


def fixed_batch(what: str) -> ExportError:
    """The error for a model that takes only the number of samples that it was traced with."""
    return ExportError(
        f"This model cannot be exported to {what}. {_ADVICE['batch']}", code="export-batch", operator=None, format=what
    )


def _classify(text: str) -> tuple[str, str | None]:
    lowered = text.lower()
    if "data-dependent" in lowered or "datadependent" in lowered or "dynamic control flow" in lowered:
        return "data-dependent", None
    if "constraintviolation" in lowered or "constraints violated" in lowered or "specialized" in lowered:
        return "batch", None
    if "no onnx function found" in lowered or "not supported" in lowered or "dispatcherror" in lowered:
        found = _OPERATOR.search(text)
        return "operator", (found[1] or found[2]).replace("::", ".") if found else None
    return "other", None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and what it was raised from, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines or [type(error).__name__])[0]
    return text if text.endswith((".", "!", "?")) else f"{text}."
