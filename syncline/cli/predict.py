"""`syncline predict`: what the command takes and prints. Not here: the work (`prediction.py`)."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer


def predict(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="Model with built-in weights (lenet), or run directory.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of images.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line, with all probabilities.")] = False,
) -> None:
    """Classify images with a trained model.

    Images may have any size and color mode.

    syncline predict lenet seven.png
    syncline predict runs/lenet-mnist-20260101-120000 scans/ more/eight.jpg
    """
    from syncline.prediction import predict as predict_images

    found = predict_images(what, images)
    widest = max(len(str(one.image)) for one in found)
    for one in found:
        if json:
            prediction = {"image": str(one.image), "class": one.label, "probability": one.probability,
                    "probabilities": one.probabilities}  # fmt: skip
            typer.echo(json_format.dumps(prediction))
        else:
            typer.echo(f"{one.image!s:<{widest}}  {one.label}  {one.probability:.1%}")
