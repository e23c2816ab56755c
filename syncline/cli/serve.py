"""`syncline serve`: what the command does and prints.

Not here: its options (`serve_options.py`), the server (`serving/server/`, `serving/ray_serve/`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from syncline.cli import serve_options as given

if TYPE_CHECKING:
    from syncline.serving.server.options import ServeOptions, Server


def serve(
    what: given.Sources,
    name: given.ModelName = None,
    port: given.HttpPort = 8000,
    grpc_port: given.GrpcPort = None,
    no_grpc: given.NoGrpc = False,
    host: given.Host = "127.0.0.1",
    processes: given.Processes = 1,
    engine: given.EngineName = "local",
    max_batch: given.MaxBatch = 8,
    follow: given.Follow = False,
    canary: given.CanaryShare = None,
    shadow: given.Shadow = False,
    no_token: given.NoToken = False,
    token_file: given.TokenFile = None,
    tls_cert: given.TlsCertificate = None,
    tls_key: given.TlsKey = None,
    access_log: given.AccessLogFile = None,
    max_requests: given.MaxRequests = 128,
    max_wait: given.MaxWait = 1.0,
    max_body: given.MaxBody = 64,
    timeout: given.Timeout = 30.0,
) -> None:
    """Serve trained models over HTTP and gRPC, with the Open Inference Protocol (V2).

    A run is exported to ONNX first. The server listens on this machine only, and
    needs its token, unless options say otherwise. Ctrl-C ends it after the
    requests in flight. Needs: pip install 'syncline[serve]'

    syncline serve runs/lenet-mnist-20260101-120000
    syncline serve model.onnx --port 8000 --no-token
    syncline serve RUN_A RUN_B --name digits --canary 10%
    syncline serve RUN --follow --processes 2
    syncline serve RUN --engine ray://10.0.0.5:6379 --processes 8
    """
    from syncline.serving.server.options import ServeOptions, make_server, token_of
    from syncline.serving.server.sources import read_share

    options = ServeOptions(
        what=tuple(what), name=name, host=host, port=port, token=None if no_token else token_of(token_file),
        processes=processes, canary=read_share(canary) if canary is not None else None, shadow=shadow, follow=follow,
        max_batch=max_batch, max_requests=max_requests, max_wait_s=max_wait, max_body_bytes=max_body * 2**20,
        timeout_s=timeout, tls_cert=tls_cert, tls_key=tls_key, access_log=access_log,
        grpc_port=None if no_grpc else _grpc_port(port, grpc_port, engine), engine=engine,
    )  # fmt: skip
    server = make_server(options, lambda text: typer.echo(text, err=True))
    server.run(lambda: _announce(server, options, shows_token=token_file is None))


def _grpc_port(port: int, asked: int | None, engine: str) -> int | None:
    """The port that the user gave; otherwise the next one after the HTTP port, or any free one. None on Ray."""
    if asked is not None or engine != "local":
        return asked
    return port + 1 if port else 0


def _announce(server: Server, options: ServeOptions, *, shows_token: bool) -> None:
    """Print where the server listens; a token from a file is not shown."""
    scheme = "https" if options.tls_cert else "http"
    shown = f"[{options.host}]" if ":" in options.host else options.host
    query = f"?token={options.token}" if options.token and shows_token else ""
    typer.echo(f"Serving at {scheme}://{shown}:{server.port}/{query}")
    if server.grpc_port is not None:
        typer.echo(f"gRPC on port {server.grpc_port}")
    if options.token and not options.tls_cert and options.host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo("The token travels unencrypted: use --tls-cert and --tls-key outside of trusted networks.", err=True)
