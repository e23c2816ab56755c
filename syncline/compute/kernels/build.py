"""Compiling the kernels on first use, and caching them.

Here: `library`, which is None if they are unavailable, `why_unavailable`, and `call`. Kernels are optional: without a
compiler, torch computes everything. Not here: what the kernels compute (`convolve.py`, `max_pool.py`, `add_up.py`,
`dropout.py`, `descent.py`, `factors.py`).

They are compiled for the processor that they run on, which takes seconds, and stored in the user's cache under a name
that depends on the source, the compiler's options and the processor. A stored library is code, so it is loaded only if
no user but this one and root can have written it.
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

from syncline.config.owned_files import cache_folder, check_cache, make_cache, open_owned, replace_file
from syncline.errors import ConfigError

Group = Literal["layers", "sums", "dropout", "descent", "factors"]
_SOURCES: dict[Group, list[Path]] = {
    "layers": [Path(__file__).with_name(name) for name in ("convolve.cpp", "max_pool.cpp", "winograd.cpp")],
    "sums": [Path(__file__).with_name("add_up.cpp")],
    "dropout": [Path(__file__).with_name("dropout.cpp")],
    "descent": [Path(__file__).with_name("descent.cpp")],
    "factors": [Path(__file__).with_name("factors.cpp")],
}
"""Compiled separately, because every exchange needs "sums" (0.1 s), and only tuned models need "layers" (seconds)."""
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_OPTIONS = ("-O3", "-march=native", "-fPIC", "-std=gnu++17")
_FOR_THREADS = ("-fopenmp",)
_COMPILERS = ("c++", "g++", "clang++")
_LIMIT_S = 60.0
"""The time limit for compiling, which takes seconds on an idle machine."""


class _Unavailable(Exception):
    """Why the kernels are unavailable."""


class _CompileError(_Unavailable):
    """The compiler failed with these options."""


def library(group: Group = "layers") -> ctypes.CDLL | None:
    """The loaded kernels, compiled if necessary; None if they are unavailable."""
    return _loaded(group)[0]


def why_unavailable(group: Group = "layers") -> str:
    """Why the kernels are unavailable; empty if they are available."""
    return _loaded(group)[1]


def call(name: str, shape: ctypes.Structure, *tensors: torch.Tensor | None) -> None:
    """Call a layer's kernel with the addresses of `tensors`."""
    kernels = library()
    assert kernels is not None, "called only if `is_applicable`"
    addresses = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    if kernels[name](ctypes.byref(shape), *addresses) != 0:
        raise MemoryError("Not enough memory for a convolution. Use a smaller batch, or --tune off.")


@functools.cache
def _loaded(group: Group) -> tuple[ctypes.CDLL | None, str]:
    try:
        compiler = _find_compiler()
        built = cache_folder("kernels") / f"{_key(compiler, _SOURCES[group])}.so"
        with contextlib.suppress(OSError, ConfigError):  # missing, damaged, or not ours: compile again
            check_cache(built.parent)
            open_owned(built).close()
            return ctypes.CDLL(str(built)), ""
        with tempfile.TemporaryDirectory(prefix="syncline-kernels-") as folder:
            fresh = Path(folder) / built.name
            _compile(compiler, _SOURCES[group], fresh)
            loaded = ctypes.CDLL(str(fresh))  # stays loaded when the file is deleted
            _store(fresh, built)
            return loaded, ""
    except (_Unavailable, OSError, RuntimeError) as problem:  # RuntimeError: no thread can be started
        return None, str(problem)


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise _Unavailable("there is no C++ compiler (g++ or clang++)")


def _compile(compiler: str, sources: Sequence[Path], to: Path) -> None:
    """With OpenMP if the compiler has it, otherwise single-threaded."""
    try:
        _compile_with([compiler, *_OPTIONS, *_FOR_THREADS], sources, to)
    except _CompileError:
        _compile_with([compiler, *_OPTIONS], sources, to)


def _compile_with(compiler: list[str], sources: Sequence[Path], to: Path) -> None:
    """Compile all sources in parallel, then link them."""
    objects = [to.with_name(f"{source.stem}.o") for source in sources]
    commands = [[*compiler, "-c", "-o", str(made), str(source)] for made, source in zip(objects, sources, strict=True)]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))  # raises the first error
    _run([*compiler, "-shared", "-o", str(to), *map(str, objects)])


def _run(command: list[str]) -> None:
    compiler = command[0]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{compiler} did not finish within {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
        raise _CompileError(f"{compiler} failed: {first.strip()}")


def _store(fresh: Path, kept: Path) -> None:
    """Store for later processes; concurrent compilations produce the same file."""
    with contextlib.suppress(OSError, ConfigError):  # a read-only home or a foreign one: compiled again next time
        make_cache(kept.parent)
        replace_file(kept, fresh.read_bytes())


def _key(compiler: str, sources: Sequence[Path]) -> str:
    texts = (path.read_text() for path in (*sources, *_HEADERS))
    facts = [*texts, *_OPTIONS, *_FOR_THREADS, compiler, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _processor() -> str:
    """The processor model: machines with different ones may share a home directory."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", about, re.MULTILINE))))
