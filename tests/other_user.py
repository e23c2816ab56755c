"""Another user of this machine, for tests of what such a user can do to ours."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="acting as another user needs root")


def as_nobody(folder: Path, do: Callable[[], object]) -> None:
    """Call `do` as the user nobody, in `folder`, which is made a place where everyone can write, like /tmp.

    `do` uses relative paths, because nobody cannot look into the folders above.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            do()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def write_files(files: dict[str, bytes | Path]) -> None:
    """Write these files, by name relative to here; a path instead of bytes makes a link to it."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
