"""The options of `syncline serve`: their names, help and panels.

Not here: their defaults and what the command does with them (`serve.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LIMITS = "Limits of each process"
_SECURITY = "Access"
_VERSIONS = "Versions"

Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Run directories, ONNX files, or lenet for the built-in one.")
]
ModelName = Annotated[
    str | None, typer.Option(help="Name of the model; several sources become its versions. Default: the source's.")
]
HttpPort = Annotated[int, typer.Option(help="Port; 0 for a free one.")]
GrpcPort = Annotated[
    int | None, typer.Option(help="Port of gRPC; 0 for a free one. Default: the next one after --port.")
]
NoGrpc = Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Processes = Annotated[int, typer.Option(help="Server processes, which share the port.")]
EngineName = Annotated[
    str,
    typer.Option(
        metavar="ENGINE", help="local, or ray or ray://HOST:PORT: a Ray Serve deployment with --processes replicas."
    ),
]
MaxBatch = Annotated[int, typer.Option(help="Rows that run together at most; 1 runs each request alone.")]

Follow = Annotated[
    bool, typer.Option("--follow", help="Serve each new checkpoint of a run.", rich_help_panel=_VERSIONS)
]
CanaryShare = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Share of requests, such as 10%, that the second source answers; rolled back if it does worse.",
        rich_help_panel=_VERSIONS,
    ),
]
Shadow = Annotated[
    bool,
    typer.Option(
        "--shadow",
        help="Send copies of requests to the second source, and count in the metrics whether it agrees.",
        rich_help_panel=_VERSIONS,
    ),
]

NoToken = Annotated[
    bool, typer.Option("--no-token", help="Answer everyone on this machine.", rich_help_panel=_SECURITY)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token. Default: a new token, which is printed.", rich_help_panel=_SECURITY),
]
TlsCertificate = Annotated[
    str | None, typer.Option(metavar="FILE", help="TLS certificate (PEM).", rich_help_panel=_SECURITY)
]
TlsKey = Annotated[
    str | None, typer.Option(metavar="FILE", help="Private key of the certificate (PEM).", rich_help_panel=_SECURITY)
]
AccessLogFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Log each response as a JSON line; - for the terminal.", rich_help_panel=_SECURITY
    ),
]

MaxRequests = Annotated[int, typer.Option(help="Requests in flight; more get 503.", rich_help_panel=_LIMITS)]
MaxWait = Annotated[
    float, typer.Option(help="Seconds a request may wait for its turn, else 503.", rich_help_panel=_LIMITS)
]
MaxBody = Annotated[int, typer.Option(help="Size of a request, in MiB.", rich_help_panel=_LIMITS)]
Timeout = Annotated[float, typer.Option(help="Seconds for a request to arrive.", rich_help_panel=_LIMITS)]
