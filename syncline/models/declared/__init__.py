"""Models as a list of layers, in a run file or in Python.

`declared.py` has what such a list is, as plain data; `read.py` and `lines.py` read it from a TOML file; `build.py`
makes a module of it, with the sizes that follow from the data (`sizes.py`), initial weights and regularizers
(`weights.py`).
"""
