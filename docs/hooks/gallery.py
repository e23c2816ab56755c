"""Generates the gallery from the files in `examples/` when the site is built: docstring and source of each.

Here: from a file to Markdown. Not here: whether the examples work (`tests/examples`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGE = "gallery.md"
_EXAMPLES = Path(__file__).parents[2] / "examples"
_INTRODUCTION = """# Gallery

Complete files to start from, in the folder `examples`. Each runs unchanged."""
_SHELVES = {
    "Programs": "*.py",
    "Run files": "*.toml",
    "A framework for the survey": "numpy_framework/*.*",
    "A run file for each model": "runs/*.toml",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs after it has collected the pages."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page(examples: Path = _EXAMPLES) -> str:
    """All examples, shelf by shelf."""
    parts = [_INTRODUCTION]
    for shelf, pattern in _SHELVES.items():
        found = sorted(examples.glob(pattern))
        if found:
            parts += [f"## {shelf}", *(_exhibit(path, examples) for path in found)]
    return "\n\n".join(parts) + "\n"


def _exhibit(path: Path, examples: Path) -> str:
    said, source = _split(path)
    name = path.relative_to(examples).as_posix()
    language = path.suffix.removeprefix(".").replace("py", "python")
    return f'### {name}\n\n{said}\n\n```{language} title="examples/{name}"\n{source.strip()}\n```'


def _split(path: Path) -> tuple[str, str]:
    """The docstring of a file as Markdown, and the rest of it."""
    text = path.read_text()
    if path.suffix == ".py":
        docstring = ast.parse(text).body[0]
        rest = "\n".join(text.splitlines()[docstring.end_lineno :])
        return _as_markdown(ast.get_docstring(ast.parse(text)) or ""), rest
    comment = re.match(r"(#.*\n)*", text)
    lines = comment[0].splitlines() if comment else []
    return _as_markdown("\n".join(line.removeprefix("#").strip() for line in lines)), text[len(comment[0]) :]


def _as_markdown(said: str) -> str:
    """Paragraphs unchanged, commands as code blocks."""
    typed = re.compile(r"^ *(?:python|syncline|spark-submit) .*$", re.M)
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", said):
        if all(typed.match(line) for line in paragraph.splitlines()):
            paragraphs.append("```sh\n" + "\n".join(line.strip() for line in paragraph.splitlines()) + "\n```")
        else:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)
