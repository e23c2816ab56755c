"""Data sets that are files inside the scikit-learn package.

Here: finding such a file. scikit-learn itself is never imported: that takes well over a second, and all we want is one
file. Not here: what is in the files (`digits.py`, `iris.py`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from syncline.errors import DataError

__all__ = ["REINSTALL", "file_in_sklearn"]

REINSTALL = "Reinstall scikit-learn: pip install --force-reinstall scikit-learn"


def file_in_sklearn(data_set: str, file: str) -> Path:
    """Where the `file` of a data set is inside the installed scikit-learn; DataError if it is not."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError(
            f"The data set {data_set!r} is a file inside scikit-learn, which is not installed. Install it: "
            "pip install scikit-learn"
        )
    path = Path(package.submodule_search_locations[0], "datasets", "data", file)
    if not path.is_file():
        raise DataError(f"The data set {data_set!r} should be at {path}, but there is no such file. {REINSTALL}")
    return path
