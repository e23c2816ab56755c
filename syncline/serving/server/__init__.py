"""The inference server: `syncline serve`, the Open Inference Protocol (V2) over HTTP.

    http ─► app ─► registry ─► batching ─► engine
    sockets  requests in,  models and    what is queued   ONNX Runtime
             responses out versions      runs together    or torch

`process.py` is one server process, `supervisor.py` starts several and replaces those that fail.
"""
