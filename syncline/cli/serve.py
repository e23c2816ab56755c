"""`syncline serve`: what the command takes and prints. Not here: the server (`serving/server/`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LIMITS = "Limits of each process"
_SECURITY = "Access"
_VERSIONS = "Versions"


def serve(
    what: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Run directories, ONNX files, or lenet for the built-in one."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the model; several sources become its versions. Default: the source's.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC; 0 for a free one. Default: the next one after --port.")
    ] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    processes: Annotated[int, typer.Option(help="Server processes, which share the port.")] = 1,
    max_batch: Annotated[int, typer.Option(help="Rows that run together at most; 1 runs each request alone.")] = 8,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve each new checkpoint of a run.", rich_help_panel=_VERSIONS)
    ] = False,
    canary: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Share of requests, such as 10%, that the second source answers; rolled back if it does worse.",
            rich_help_panel=_VERSIONS,
        ),
    ] = None,
    shadow: Annotated[
        bool,
        typer.Option(
            "--shadow",
            help="Send copies of requests to the second source, and count in the metrics whether it agrees.",
            rich_help_panel=_VERSIONS,
        ),
    ] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Answer everyone on this machine.", rich_help_panel=_SECURITY)
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token. Default: a new token, which is printed.", rich_help_panel=_SECURITY),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="TLS certificate (PEM).", rich_help_panel=_SECURITY)
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Private key of the certificate (PEM).", rich_help_panel=_SECURITY),
    ] = None,
    access_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Log each response as a JSON line; - for the terminal.", rich_help_panel=_SECURITY
        ),
    ] = None,
    max_requests: Annotated[int, typer.Option(help="Requests in flight; more get 503.", rich_help_panel=_LIMITS)] = 128,
    max_wait: Annotated[
        float, typer.Option(help="Seconds a request may wait for its turn, else 503.", rich_help_panel=_LIMITS)
    ] = 1.0,
    max_body: Annotated[int, typer.Option(help="Size of a request, in MiB.", rich_help_panel=_LIMITS)] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for a request to arrive.", rich_help_panel=_LIMITS)] = 30.0,
) -> None:
    """Serve trained models over HTTP and gRPC, with the Open Inference Protocol (V2).

    A run is exported to ONNX first. The server listens on this machine only, and
    needs its token, unless told otherwise. Ctrl-C ends it after the requests in
    flight. Needs: pip install 'syncline[serve]'

    syncline serve runs/lenet-mnist-20260101-120000
    syncline serve model.onnx --port 8000 --no-token
    syncline serve RUN_A RUN_B --name digits --canary 10%
    syncline serve RUN --follow --processes 2
    """
    import msgspec

    from syncline.serving.server.options import ServeOptions, make_supervisor, token_of
    from syncline.serving.server.sources import read_share

    options = ServeOptions(
        what=tuple(what), name=name, host=host, port=port, token=None if no_token else token_of(token_file),
        processes=processes, canary=read_share(canary) if canary is not None else None, shadow=shadow, follow=follow,
        max_batch=max_batch, max_requests=max_requests, max_wait_s=max_wait, max_body_bytes=max_body * 2**20,
        timeout_s=timeout, tls_cert=tls_cert, tls_key=tls_key, access_log=access_log,
    )  # fmt: skip
    if grpc_port is None and not no_grpc:
        grpc_port = port + 1 if port else 0
    options = msgspec.structs.replace(options, grpc_port=None if no_grpc else grpc_port)
    supervisor = make_supervisor(options, lambda text: typer.echo(text, err=True))

    def announce() -> None:
        scheme = "https" if tls_cert else "http"
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={options.token}" if options.token and token_file is None else ""
        typer.echo(f"Serving at {scheme}://{shown}:{supervisor.port}/{query}")
        if supervisor.grpc_port is not None:
            typer.echo(f"gRPC on port {supervisor.grpc_port}")
        if options.token and not tls_cert and host not in ("127.0.0.1", "localhost", "::1"):
            typer.echo(
                "The token travels unencrypted: use --tls-cert and --tls-key outside of trusted networks.", err=True
            )

    supervisor.run(announce)
