"""Amounts of memory such as '900MB'."""

from __future__ import annotations

import math
import re

from syncline.errors import ConfigError

_UNITS = {
    "": 10**6, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "M": 10**6, "G": 10**9,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_LARGEST_BYTES = 2**62
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(name: str, amount: str | float) -> int:
    """`'900MB'`, `'2GB'`, or a plain number, in MB; `name` is the setting, for the error message.

    >>> bytes_of("memory_limit", "1.5 GB"), bytes_of("memory_limit", 900)
    (1500000000, 900000000)
    """
    found = None
    if isinstance(amount, str):
        found = _AMOUNT.fullmatch(amount)
    elif not isinstance(amount, bool) and math.isfinite(amount):
        found = _AMOUNT.fullmatch(f"{amount:f}")
    size = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found is not None else 0.0
    if not 0 < size <= _LARGEST_BYTES:
        raise ConfigError.for_setting(
            name, amount, "an amount of memory such as '900MB' or '2GB'; the default unit is MB"
        )
    return int(size)
