"""`syncline predict`: what the command takes and prints. Not here: the work (`syncline/inference/`)."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["predict"]


def predict(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="A model that comes with weights (lenet), or a run directory.")
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures, or folders with pictures.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all probabilities.")] = False,
) -> None:
    """Say what is on pictures, of any size and colour, with a trained model.

    syncline predict lenet seven.png
    syncline predict runs/lenet-mnist-20260101-120000 scans/ more/eight.jpg
    """
    from syncline.inference.predict import predict as predict_images

    found = predict_images(what, images)
    widest = max(len(str(one.image)) for one in found)
    for one in found:
        if json:
            told = {"image": str(one.image), "class": one.label, "probability": one.probability,
                    "probabilities": one.probabilities}  # fmt: skip
            typer.echo(json_format.dumps(told))
        else:
            typer.echo(f"{one.image!s:<{widest}}  {one.label}  {one.probability:.1%}")
