"""Names of layers, activations, losses, optimizers, schedules, initializers, regularizers and metrics.

One file per kind, each with a table of names, read from the installed torch and torchmetrics. The same
tables serve building (`models/declared/`, `workers/build.py`) and `syncline list`.
"""
