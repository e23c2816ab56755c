"""The code blocks of a page, and which of them are not run.

A block that cannot run in a test has a comment on the line before it: `<!-- not run: needs a cluster -->`.
Here: finding blocks. Not here: running them (`running_pages.py`).
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

PYTHON = frozenset({"python", "py"})
COMMANDS = frozenset({"sh", "bash", "console", "shell"})
RUN_FILE = frozenset({"toml"})
OUTPUT = frozenset({"", "text", "json", "html"})
"""Output of a program, or a directory listing: nothing to run."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+)(?P<info>.*)$")
_MARK = re.compile(r"^\s*<!-- not run:(?P<reason>.*)-->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code, counted from 1."""

    language: str
    code: str
    line: int
    title: str | None = None
    """The name of the file that the block shows."""
    not_run: str | None = None
    """The reason why it is not run, if there is one."""

    @property
    def is_code(self) -> bool:
        """Whether a reader would run it."""
        return self.language not in OUTPUT

    @property
    def file_name(self) -> str | None:
        """What to save it as: its title, or a name in a comment on its first line."""
        comment = re.match(r"# ([\w.-]+\.(?:toml|py))\n", self.code)
        return self.title or (comment[1] if comment else None)


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page in Markdown, in order."""
    lines, found, number = page.splitlines(), [], 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        start = number
        while number < len(lines) and lines[number].strip() != fence["ticks"]:
            number += 1
        if number == len(lines):
            raise ValueError(f"line {start}: the block that begins here does not end")
        code = textwrap.dedent("\n".join(lines[start:number]) + "\n")
        found.append(_block(fence["info"].strip(), code, start + 1, _mark_before(lines[: start - 1])))
        number += 1
    return found


def commands_of(block: Block) -> str:
    """The commands of a block, without prompts, and without what they print if there are prompts."""
    lines = block.code.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(lines) + "\n"


def _block(info: str, code: str, line: int, not_run: str | None) -> Block:
    language = re.match(r"[\w-]*", info)
    title = re.search(r'title="([^"]+)"', info)
    return Block(language[0] if language else "", code, line, title[1] if title else None, not_run)


def _mark_before(lines: list[str]) -> str | None:
    before = next((line for line in reversed(lines[-2:]) if line.strip()), "")
    mark = _MARK.match(before)
    return mark["reason"].strip() if mark else None
