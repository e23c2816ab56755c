"""Downloading files atomically.

Here: the cache folder, an atomic writer, and downloading a URL with MD5 verification. Every network wait has a timeout.
Not here: the files of a dataset and where they are published (`mnist.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from syncline.config.owned_files import cache_folder
from syncline.data.named import Progress
from syncline.errors import DataError

CHUNK_BYTES = 1 << 16

SLOWEST_BYTES_PER_S = 1024
"""A server slower than this, on average, counts as hanging: each read succeeds, yet the download never ends."""


def cache_dir() -> Path:
    """The folder for downloaded datasets: `syncline/data` in `$XDG_CACHE_HOME`, or else in `~/.cache`."""
    try:
        return cache_folder("data")
    except RuntimeError as error:
        raise DataError(
            "There is no cache folder, because this user has no home directory. Set XDG_CACHE_HOME to the absolute "
            "path of a writable folder."
        ) from error


def environment_data_dir() -> Path | None:
    """The folder in `$SYNCLINE_DATA`, or None if it is not set."""
    value = os.environ.get("SYNCLINE_DATA", "")
    return Path(value).expanduser() if value else None


def place(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write `target` atomically, even if `write` fails or this process is killed.

    The bytes go to a temporary file in the same folder, which is synced and then renamed to `target`. Several processes
    may write the same target at once: the last one wins, and no reader sees a mixture.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile: its files are readable by their owner alone, and a cache may be shared.
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:  # Ctrl-C too must leave nothing behind
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(
                f"{target} could not be written: {error.strerror or error}. Free up disk space, fix the permissions, "
                "or choose another folder with XDG_CACHE_HOME."
            ) from error
        raise


def place_bytes(target: Path, data: bytes) -> None:
    """Write these bytes to `target` atomically."""
    place(target, lambda file: file.write(data))


def fetch(url: str, target: Path, *, md5: str, progress: Progress | None = None, timeout_s: float = 20) -> None:
    """Download `url` to `target`, and verify its `md5`; DataError if it fails.

    `timeout_s` limits each wait for the server. Resolving and connecting may take twice as long in total; after that
    the average speed must stay above `SLOWEST_BYTES_PER_S`.
    """

    def read(response: http.client.HTTPResponse, done: int) -> bytes:
        try:
            # One read from the socket; read() would wait for a full chunk, and hide a slow server.
            return response.read1(CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{url} was interrupted after {done} bytes: {_reason(error, timeout_s)}.") from error

    def download(file: BinaryIO) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        done = 0
        try:
            response = _open(url, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{url} could not be opened: {_reason(error, timeout_s)}.") from error
        with response:
            total = response.length
            start_s = time.monotonic()
            if progress is not None:
                progress(target.name, 0, total)
            while chunk := read(response, done):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(target.name, done, total)
                elapsed_s = time.monotonic() - start_s
                if elapsed_s > timeout_s and done < elapsed_s * SLOWEST_BYTES_PER_S:
                    raise DataError(
                        f"{url} is too slow: {done} bytes came in {elapsed_s:.1f} s, less than "
                        f"{SLOWEST_BYTES_PER_S} per second."
                    )
        if total is not None and done != total:
            raise DataError(
                f"{url} was interrupted after {done} of {total} bytes.",
                code="incomplete-download",
                done=done,
                total=total,
            )
        if digest.hexdigest() != md5:
            raise DataError(
                f"{url} returned {done} bytes with the MD5 {digest.hexdigest()}, but the published file has {md5}: "
                "perhaps a proxy or a login page replaced it.",
                code="md5-mismatch",
                url=url,
                md5=digest.hexdigest(),
                expected=md5,
            )

    place(target, download)


def md5_hex(data: bytes) -> str:
    """The md5 of `data`, as hexadecimal digits. It detects accidents, not attacks."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _open(url: str, timeout_s: float) -> http.client.HTTPResponse:
    """Open `url` in bounded time.

    urllib applies its timeout to each address of a host in turn, and not to the DNS lookup. S3 has
    eight addresses: behind a firewall that drops packets, 20 s would become minutes. So a thread opens
    the connection, and we can stop waiting for it. Twice the timeout allows for one dead address.
    """
    opened: Future[http.client.HTTPResponse] = Future()

    def attempt() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "syncline"})
        try:
            opened.set_result(urllib.request.urlopen(request, timeout=timeout_s))
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=attempt, name="syncline-open-url", daemon=True).start()
    try:
        return opened.result(timeout=2 * timeout_s)
    except BaseException:
        opened.add_done_callback(_close_unless_failed)
        raise


def _close_unless_failed(opened: Future[http.client.HTTPResponse]) -> None:
    error = opened.exception()
    if error is None:
        opened.result().close()
    elif isinstance(error, urllib.error.HTTPError):
        error.close()  # it is also a response, and holds the connection


def _reason(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason, timeout_s)
    if isinstance(error, TimeoutError):
        return f"timed out after {timeout_s:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
