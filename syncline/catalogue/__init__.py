"""What goes by name: layers, activations, losses, optimisers, schedules, initialisers, regularisers and metrics.

One file per kind, each with the table of its names, read from torch and torchmetrics as they are installed. The same
tables serve building (`declare/`, `workers/build.py`) and `syncline list`.
"""
