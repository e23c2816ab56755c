"""Files that other users must not plant, replace or read.

Here: opening files without following symbolic links, checking who owns and who can write them, replacing files through
random temporary names, and the modes of new files. Not here: which files a run has (`telemetry/run_dir.py`).

"Ours" means: owned by this user or by root, and not writable by anyone else. New files are as readable as the directory
that they are in. So the mode of a run directory decides about all files in it, in every process that writes there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import secrets
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from syncline.errors import ConfigError

_TEMPORARY = ".tmp"
_LONGEST_STEM = 50  # a file name has at most 255 bytes, and a character up to 4


# --- reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file of any owner for reading, if it is a regular file and no symbolic link."""
    return os.fdopen(_opened(path, os.O_RDONLY), "rb")


def open_owned(path: Path) -> BinaryIO:
    """Open a file for reading, if the file and its directory are ours; otherwise `ConfigError`."""
    folder = _opened_directory(path.parent)
    try:
        descriptor = _opened(path, os.O_RDONLY, folder)
    finally:
        os.close(folder)
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _writable_by_others(path, "chmod go-w")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_owned(path: Path) -> bytes:
    """The content of a file, if the file and its directory are ours; otherwise `ConfigError`."""
    with open_owned(path) as file:
        return file.read()


def check_directory(path: Path) -> None:
    """Raise `ConfigError` unless the directory is ours and no symbolic link."""
    os.close(_opened_directory(path))


def check_code(path: Path) -> None:
    """Raise `ConfigError` if another user owns this Python file or folder, or anyone can write it. Links are fine."""
    found = path.stat()
    _check_owner(path, found)
    if found.st_mode & stat.S_IWOTH:
        raise _writable_by_others(path, "chmod o-w")


def is_our_directory(path: Path) -> bool:
    """Whether `path` is a directory that passes `check_directory`."""
    try:
        check_directory(path)
    except (OSError, ConfigError):
        return False
    return True


# --- writing ----------------------------------------------------------------------------------------------------------


def file_mode(folder: Path) -> int:
    """The mode for a new file in this directory, before the umask: as readable as the directory."""
    return 0o600 | (folder.stat().st_mode & 0o044)


def make_directory(path: Path) -> None:
    """Create a directory that is as readable as its parent, and its parents; an existing one must be ours."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700 | (path.parent.stat().st_mode & 0o055))
    except FileExistsError:
        check_directory(path)


def open_append(path: Path) -> FileIO:
    """Open a file for appending and reading, unbuffered; it is created if necessary, and links are not followed."""
    descriptor = _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode=file_mode(path.parent))
    return FileIO(descriptor, "a+b")


def temporary_name(path: Path) -> Path:
    """An unpredictable name beside `path`, for the file that will replace it."""
    return path.with_name(f".{path.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}{_TEMPORARY}")


def create_new(path: Path, mode: int | None = None) -> BinaryIO:
    """Create a file that must not exist, not even as a link, and open it for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, file_mode(path.parent) if mode is None else mode), "wb")


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Replace the file at `path` atomically. If that fails, nothing has changed."""
    temporary = temporary_name(path)
    try:
        with create_new(temporary) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they replaced `path`."""
    for left in path.parent.glob(f".{path.name[:_LONGEST_STEM]}.*{_TEMPORARY}"):
        left.unlink(missing_ok=True)


# --- the user's cache -------------------------------------------------------------------------------------------------


def cache_home() -> Path:
    """`$XDG_CACHE_HOME`, or else `~/.cache`; `RuntimeError` if this user has no home directory."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification requires us to ignore a relative path; an unset variable is one, too.
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def cache_folder(name: str) -> Path:
    """The directory `name` of our cache; it need not exist."""
    return cache_home() / "syncline" / name


def check_cache(folder: Path) -> None:
    """Raise `ConfigError` unless the cache directory and those above it are safe, for what is trusted, such as code.

    The user's cache may be a link, because some homes keep it on another disk. Ours is not.
    """
    home = cache_home()
    found = home.stat()
    _check_owner(home, found)
    _check_not_open_to_all(home, found)
    for part in _ours_in(home, folder):
        check_directory(part)


def make_cache(folder: Path) -> None:
    """Create a cache directory for this user alone, and check it as `check_cache` does."""
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    for part in _ours_in(home, folder):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
    check_cache(folder)


def _ours_in(home: Path, folder: Path) -> list[Path]:
    """The directories between `home` and `folder`, the outermost first."""
    return [*reversed([parent for parent in folder.parents if parent.is_relative_to(home) and parent != home]), folder]


# --- checks -----------------------------------------------------------------------------------------------------------


def _opened(path: Path, flags: int, folder: int | None = None, mode: int = 0) -> int:
    """A descriptor of a regular file; its name is looked up in the open directory `folder`, if given."""
    # Opening a pipe without a writer would wait for one; for regular files, O_NONBLOCK means nothing.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path if folder is None else path.name, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from None
        if error.errno in (errno.EISDIR, errno.ENXIO):  # ENXIO: a socket
            raise _is_no_file(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _is_no_file(path)
    return descriptor


def _opened_directory(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise _is_link(path) from None
        if error.errno == errno.EACCES:
            _check_owner(path, path.stat())  # says more than "permission denied"
        raise
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found)
        _check_not_open_to_all(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid in (os.geteuid(), 0):
        return
    owner = _user_name(found.st_uid)
    raise ConfigError(
        f"{path} belongs to the user {owner}, and using it could run their code with your permissions. If you trust "
        "them, make a copy that is yours (cp -r) and use that. Otherwise train again.",
        code="foreign-run", path=str(path), owner=owner,
    )  # fmt: skip


def _check_not_open_to_all(folder: Path, found: os.stat_result) -> None:
    """In a directory with the sticky bit, such as /tmp, users can remove only their own files."""
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise _writable_by_others(folder, "chmod o-w")


def _writable_by_others(path: Path, fix: str) -> ConfigError:
    return ConfigError(
        f"Other users can write {path}, so its content is not trusted. If they have not changed it, remove that "
        f"permission: {fix} {path}",
        code="writable-by-others", path=str(path),
    )  # fmt: skip


def _is_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a symbolic link, and Syncline does not follow links in directories that it reads or writes. "
        "Replace it with what it points to.",
        code="linked-file", path=str(path),
    )  # fmt: skip


def _is_no_file(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a regular file. Remove it.", code="not-a-file", path=str(path))


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)
