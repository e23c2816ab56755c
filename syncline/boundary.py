"""Where exceptions leave Syncline: the expected ones become messages, the others are reported as bugs.

    a SynclineError                     stays as it is
    a failure of the system             becomes a SynclineError: a full disk, a limit, a deleted working directory
    an exception of the user's code     stays as it is
    anything else                       is a bug in Syncline: it gets a note, and a report to attach

Here: telling them apart, and the report. Not here: exit codes (`cli/main.py`), and exceptions in workers
(`workers/failure.py`, `coordinator/root_cause.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shlex
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from syncline.errors import ConfigError, SynclineError

FEWEST_OPEN_FILES = 64
"""With fewer, a run would end in the middle of a library; with a few more workers it may need more than this."""

_REPORTED = "_syncline_report"
_RUN = "_syncline_run"
"""Attributes of an exception that is being reported: the report's path, and the directory of its run."""

_DEPENDENCIES = frozenset(
    ("_pytest", "click", "cloudpickle", "fsspec", "grpc", "httptools", "lightning_utilities", "lmdb", "msgspec",
     "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "open_inference", "pandas", "PIL", "pluggy", "py4j",
     "pyarrow", "pyspark", "ray", "rich", "s3fs", "safetensors", "scipy", "sklearn", "tensorboard", "timm", "torch",
     "torchmetrics", "transformers", "typer", "uvloop", "zmq")
)  # fmt: skip
_OURS = str(Path(__file__).parent) + os.sep
_STANDARD_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"])) + os.sep
_OUR_MISTAKES = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EFAULT)
"""The system refuses these because the caller is wrong, so they are bugs."""
_SECRET_NAME = r"[\w-]*(?:secret|token|passw(?:or)?d|api[_-]?key|credential)[\w-]*"


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """For the Python API: expected failures become `SynclineError`s; any other exception leaves unchanged.

    If it is a bug in Syncline, it has a note that says so and names the report.
    """
    try:
        yield
    except SynclineError:
        raise
    except Exception as error:
        if is_users(error):
            raise
        if (expected := as_expected(error)) is not None:
            raise expected from error
        if not hasattr(error, _REPORTED):
            error.add_note(bug_message(error))
        raise


@contextlib.contextmanager
def in_run(run_dir: Path) -> Iterator[None]:
    """A bug that shows within is reported in this run directory."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(AttributeError):  # a class with slots
            setattr(error, _RUN, run_dir)
        raise


def check_surroundings() -> None:
    """Refuse to start a run where it would fail in obscure ways: without a working directory, or with few files."""
    if not _has_working_directory():
        raise _no_working_directory()
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < FEWEST_OPEN_FILES:
        raise SynclineError(
            f"This process may open {most} files, but a run needs {FEWEST_OPEN_FILES} or more. Raise the limit: "
            "ulimit -n 1024",
            code="too-few-files", limit=most, least=FEWEST_OPEN_FILES,
        )  # fmt: skip


# Expected failures


def as_expected(error: BaseException) -> SynclineError | None:
    """The message for a failure of the system or the surroundings; None if that is not what happened."""
    if isinstance(error, SynclineError):
        return error
    if isinstance(error, UnicodeEncodeError) and error.reason.startswith("surrogates not"):
        shown = error.object[max(error.start - 20, 0) : error.end + 20].encode(errors="backslashreplace").decode()
        return ConfigError(
            f"A name or a path is not valid UTF-8: '{shown}'. Syncline writes names as UTF-8: rename it.",
            code="not-utf8", text=shown,
        )  # fmt: skip
    number = errno.ENOMEM if isinstance(error, MemoryError) else _errno_of(error)
    if number is None or number in _OUR_MISTAKES:
        return None
    if number == errno.ENOENT and not _has_working_directory():
        return _no_working_directory()
    name = getattr(error, "filename", None)
    path = os.fsdecode(name) if isinstance(name, (str, bytes)) else None
    what = f"{path}: {os.strerror(number)}." if path else f"{os.strerror(number)}."
    code, advice = _cause(number, path)
    return SynclineError(" ".join(filter(None, [what, advice])), code=code, errno=errno.errorcode[number], path=path)


def advice_on(error: BaseException) -> str:
    """What to do about a limit or a full disk that some code ran into, in a sentence or two; else empty."""
    number = _errno_of(error)
    limits = (errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    return _cause(number, None)[1] if number in limits else ""


def shared_memory_left() -> str:
    """How full /dev/shm is.

    >>> shared_memory_left()                                                        # doctest: +SKIP
    '0.3 MB of 67.1 MB free'
    """
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "there is none"
    return f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB free"


def _errno_of(error: BaseException) -> int | None:
    is_zmq = type(error).__module__.partition(".")[0] == "zmq"  # a ZMQError is no OSError, but has its errno
    number = getattr(error, "errno", None) if isinstance(error, OSError) or is_zmq else None
    return number if number in errno.errorcode else None


def _cause(number: int | None, path: str | None) -> tuple[str, str]:
    """A code for this errno, and its reason and fix."""
    if number in (errno.EMFILE, errno.ENFILE):
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            "too-few-files",
            f"A process may open {most} files here. Raise the limit: ulimit -n {max(2 * most, 1024)}",
        )
    if number == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = f"is {most:,} bytes here" if most >= 0 else "is that of the file system"
        return "file-too-large", f"The limit on the size of a file {limit}. Raise it (ulimit -f unlimited)."
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "disk-full", "The disk or the quota is full. Free some space, or choose another folder with --out."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "not-permitted", "Check who owns it and its mode, or choose another folder."
    if number == errno.ENOMEM:
        return "no-memory", "There is not enough memory for this process. Use fewer --workers or smaller data."
    if number == errno.EAGAIN:
        return "process-limit", "The limit on processes or threads may be reached (ulimit -u). Use fewer --workers."
    if number in (errno.EIO, errno.ESTALE):
        return "disk-error", "The disk or the network file system fails. See the kernel log (dmesg)."
    if path is not None:
        return "path", "Check the path."
    return "system-error", ""


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _no_working_directory() -> ConfigError:
    return ConfigError(
        "The working directory was deleted. Change to one that exists, such as: cd ~", code="no-working-directory"
    )


# Whose exception it is


def is_users(error: BaseException) -> bool:
    """Whether an exception passed through code that belongs neither to Syncline nor to what it is built on."""
    return any(_is_users_file(name) for name in _files_of(error.__traceback__))


def _files_of(frames: TracebackType | None) -> Iterator[str]:
    while frames is not None:
        yield frames.tb_frame.f_code.co_filename
        frames = frames.tb_next


def _is_users_file(name: str) -> bool:
    if name.startswith((_OURS, "<frozen ", "<string>", "<__array_function__")):
        return False
    _, installed, package = name.rpartition("/site-packages/")
    if installed:
        return package.partition("/")[0].removesuffix(".py") not in _DEPENDENCIES
    if not os.path.isabs(name):  # compiled by Cython, as pyarrow/_fs.pyx
        return name.partition("/")[0] not in _DEPENDENCIES
    return not name.startswith(_STANDARD_LIBRARY)


# Bugs


def bug_message(error: BaseException) -> str:
    """The message for an unexpected exception; writes its report, once."""
    kind = type(error).__name__
    path = getattr(error, _REPORTED, None) or _write_report(error)
    with contextlib.suppress(AttributeError):
        setattr(error, _REPORTED, path)
    if path is None:
        attach = f"The report could not be written to a file. Please attach this:\n\n{report_on(error)}"
    else:
        attach = f"Please report it and attach {path}, which holds the versions, the command and the traceback."
    return f"This is a bug in Syncline: an unexpected {kind}. {attach}"


def report_on(error: BaseException) -> str:
    """What is needed to find the cause of a bug, without secrets."""
    import platform  # not above: every command would wait for it

    from syncline import __version__

    text = "".join(traceback.format_exception(error))
    facts = {
        "syncline": __version__,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "platform": platform.platform(),
        "command": shlex.join(sys.argv),
    }
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return without_secrets("\n".join([*lines, "", text]))


def without_secrets(text: str) -> str:
    """`text` with passwords, tokens and the like replaced by asterisks.

    >>> without_secrets("--api-key abc s3://me:pass@host token=xyz SYNCLINE_SECRET=1234567")
    '--api-key *** s3://***@host token=*** SYNCLINE_SECRET=***'
    """
    for name, value in os.environ.items():
        if len(value) >= 6 and re.fullmatch(_SECRET_NAME, name, re.IGNORECASE):
            text = text.replace(value, "***")
    text = re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)
    return re.sub(rf"(?i)({_SECRET_NAME}['\"]?\s*[=:]\s*|--{_SECRET_NAME}\s+)[^\s,;]+", r"\1***", text)


def _write_report(error: BaseException) -> Path | None:
    """The report as a file that only this user can read: in the run directory, else among the temporary files."""
    text = report_on(error).encode(errors="backslashreplace")
    for folder in filter(None, [getattr(error, _RUN, None), tempfile.gettempdir()]):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="syncline-bug-", suffix=".txt", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            return Path(path)
    return None


def _version_of(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
