"""The page of public names, made of `syncline.__all__` whenever the site is built; mkdocstrings adds what they say.

Here: which names there are, in which order. Not here: what they mean (their docstrings).
"""

from __future__ import annotations

import dataclasses

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import syncline
from syncline.config.run import RunConfig, describe

PAGE = "reference/python.md"
_INTRODUCTION = """# Python

What `import syncline` offers. Names are loaded on first use, so importing it takes no time."""
_CHAPTERS = {
    "Training": ("driver", "result", "workers.own_loop", "task"),
    "Settings": ("config",),
    "What is exchanged": ("strategies.what", "algorithms.outer"),
    "When": ("strategies.when",),
    "With whom": ("strategies.whom",),
    "How it is encoded": ("strategies.how",),
    "Strategies": ("strategies",),
    "Errors": ("errors",),
}
_SPARK = "## Spark\n\n::: syncline.spark.Estimator\n\n::: syncline.spark.Model"
_OTHERS = "More"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs calls this once it has found the pages."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """A chapter for each purpose, and in it every public name of that purpose."""
    names: dict[str, list[str]] = {chapter: [] for chapter in (*_CHAPTERS, _OTHERS)}
    for name in syncline.__all__:
        names[_chapter(name)].append(name)
    chapters = ["\n\n".join([f"## {chapter}", *map(_entry, those)]) for chapter, those in names.items() if those]
    return "\n\n".join([_INTRODUCTION, *chapters, _SPARK]) + "\n"


def _chapter(name: str) -> str:
    home = syncline._HOME.get(name, "errors")
    for chapter, places in _CHAPTERS.items():
        if any(home == place or home.startswith(f"{place}.") for place in places):
            return chapter
    return _OTHERS


def _entry(name: str) -> str:
    if name == "RunConfig":  # its fields' sentences are in their metadata, where the flags come from, too
        return f"::: syncline.{name}\n    options:\n      members: false\n      show_signature: false\n\n{_settings()}"
    if name == "worker":  # what it returns is what one works with
        return f"::: syncline.{name}\n\n::: syncline.workers.own_loop.Worker\n    options:\n      heading_level: 4"
    return f"::: syncline.{name}"


def _settings() -> str:
    defaults = {f.name: f.default for f in dataclasses.fields(RunConfig)}
    rows = [f"| `{name}` | `{defaults[name]!r}` | {said} |" for name, said in describe(RunConfig).items()]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])
