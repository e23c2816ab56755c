"""Compiling the kernels on first use, and finding them again.

Here: `library`, which is None where they cannot be had, `why_not`, which says why, and `call`. Nothing of it is needed
for installing or for training: without a compiler, everything is torch's own. Not here: what the kernels compute
(`convolve.py`, `max_pool.py`, `add_up.py`).

They are compiled for the very processor that they run on, in some seconds, and kept in the user's cache under a name
that depends on the source, on how it was compiled and on the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

__all__ = ["Group", "call", "library", "why_not"]

Group = Literal["layers", "sums"]
_SOURCES: dict[Group, list[Path]] = {
    "layers": [Path(__file__).with_name(name) for name in ("convolve.cpp", "max_pool.cpp", "winograd.cpp")],
    "sums": [Path(__file__).with_name("add_up.cpp")],
}
"""What is compiled together: what every exchange needs takes a tenth of a second, convolutions take some."""
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_OPTIONS = ("-O3", "-march=native", "-fPIC", "-std=gnu++17")
_FOR_THREADS = ("-fopenmp",)
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 60.0
"""How long compiling may take: it takes some seconds, but machines can be busy."""


class _CannotBeHad(Exception):
    """Says why there are no kernels here."""


class _DoesNotCompile(_CannotBeHad):
    """With these options, at least."""


def library(group: Group = "layers") -> ctypes.CDLL | None:
    """The kernels: loaded, after they were compiled if need be."""
    return _loaded(group)[0]


def why_not(group: Group = "layers") -> str:
    """Why there are none; empty if there are."""
    return _loaded(group)[1]


def call(name: str, shape: ctypes.Structure, *tensors: torch.Tensor | None) -> None:
    """Call a layer's kernel with the memory of these tensors, which live as long as the call: they are arguments."""
    kernels = library()
    assert kernels is not None, "called only where `suits` said yes"
    addresses = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    if kernels[name](ctypes.byref(shape), *addresses) != 0:
        raise MemoryError("There is not enough memory for a convolution. Use a smaller batch, or --tune off.")


@functools.cache
def _loaded(group: Group) -> tuple[ctypes.CDLL | None, str]:
    try:
        compiler = _find_compiler()
        built = _cache_folder() / f"{_key(compiler, _SOURCES[group])}.so"
        if built.exists():
            with contextlib.suppress(OSError):  # spoiled: compiled anew
                return ctypes.CDLL(str(built)), ""
        with tempfile.TemporaryDirectory(prefix="syncline-kernels-") as folder:
            fresh = Path(folder) / built.name
            _compile(compiler, _SOURCES[group], fresh)
            loaded = ctypes.CDLL(str(fresh))  # it stays when the file is gone
            _keep(fresh, built)
            return loaded, ""
    except (_CannotBeHad, OSError, RuntimeError) as problem:  # the last: no thread can be started
        return None, str(problem)


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise _CannotBeHad("there is no C++ compiler (g++ or clang++)")


def _compile(compiler: str, sources: Sequence[Path], to: Path) -> None:
    """With several threads if the compiler can do that, otherwise for one."""
    try:
        _compile_with([compiler, *_OPTIONS, *_FOR_THREADS], sources, to)
    except _DoesNotCompile:
        _compile_with([compiler, *_OPTIONS], sources, to)


def _compile_with(compiler: list[str], sources: Sequence[Path], to: Path) -> None:
    """All sources at the same time, then what they become is put together."""
    objects = [to.with_name(f"{source.stem}.o") for source in sources]
    commands = [[*compiler, "-c", "-o", str(made), str(source)] for made, source in zip(objects, sources, strict=True)]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))  # the first that complains is heard
    _run([*compiler, "-shared", "-o", str(to), *map(str, objects)])


def _run(command: list[str]) -> None:
    compiler = command[0]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _CannotBeHad(f"{compiler} had not compiled them after {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
        raise _DoesNotCompile(f"{compiler} does not compile them: {first.strip()}")


def _keep(fresh: Path, kept: Path) -> None:
    """For the next process; whoever else compiles them at the same time ends up with the same."""
    with contextlib.suppress(OSError):  # a home that cannot be written to: compiled again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=".new-", delete=False) as new:
            new.write(fresh.read_bytes())
        os.replace(new.name, kept)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / "kernels"


def _key(compiler: str, sources: Sequence[Path]) -> str:
    texts = (path.read_text() for path in (*sources, *_HEADERS))
    facts = [*texts, *_OPTIONS, *_FOR_THREADS, compiler, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What kind it is: code for one kind may not run on another, which may well share the home."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", about, re.MULTILINE))))
