"""A server that a Python program started: options on stdin as one JSON line, then `{"port": ...}` on stdout.

It ends when its stdin is closed, so that it never outlives the program. Not here: the program's end
(`serving/serve.py`).
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from syncline.boundary import as_expected
from syncline.serving.server.options import ServeOptions, make_server

__all__ = ["main"]


def main() -> None:
    """Serve until stdin is closed, or SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a notebook interrupts a cell, not the server
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServeOptions)
    try:
        server = make_server(options, _say)
        server.when_closed(0)
        server.run(lambda: _tell({"port": server.port, "grpc_port": server.grpc_port}))
    except Exception as error:
        known = as_expected(error)
        if known is None:
            raise
        _tell({"error": str(known), "code": known.code})


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _tell(message: dict[str, object]) -> None:
    os.write(1, msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
