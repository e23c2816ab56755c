"""Trained models outside of a run: exported files, scoring of many rows, and the server.

ONNX Runtime 1.29 and later sends the names and hashes of models to its vendor unless this variable is set before it is
imported. A user's models are private.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
