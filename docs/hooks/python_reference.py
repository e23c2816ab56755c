"""Generates the page of public names from `syncline.__all__` when the site is built; mkdocstrings adds the docstrings.

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

The public names of `syncline`. They are loaded on first use, so that the import is fast."""
_CHAPTERS = {
    "Training": ("driver", "result", "workers.own_loop", "task"),
    "Settings": ("config",),
    "What is exchanged": ("strategies.what", "algorithms.outer"),
    "When": ("strategies.when",),
    "With whom": ("strategies.whom",),
    "How it is encoded": ("strategies.how",),
    "Strategies": ("strategies.strategy", "strategies.hierarchy", "strategies.switching", "strategies.own"),
    "Writing a strategy": ("strategies",),
    "Errors": ("errors",),
}
_SHOWN = {  # where something else than everything helps the reader
    "Result": "\n    options: {show_signature: false}",
    "Task": "\n    options: {members: false}",
    "RunConfig": "\n    options: {members: false, show_signature: false}",  # its sentences are in the fields' metadata
    "Worker": "\n    options: {heading_level: 4, show_signature: false, members: [rank, size, device, prepare, log]}",
}
_SPARK = "## Spark\n\n::: syncline.spark.Estimator\n\n::: syncline.spark.Model"
_OTHERS = "More"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs after it has collected the pages."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """A chapter per purpose, with its public names."""
    names: dict[str, list[str]] = {chapter: [] for chapter in (*_CHAPTERS, _OTHERS)}
    for name in sorted(syncline.__all__, key=lambda name: (_place(name)[1], name != "train")):
        names[_place(name)[0]].append(name)
    chapters = ["\n\n".join([f"## {chapter}", *map(_entry, those)]) for chapter, those in names.items() if those]
    return "\n\n".join([_INTRODUCTION, *chapters, _SPARK]) + "\n"


def _place(name: str) -> tuple[str, int]:
    """The chapter of a name, and the place of its module there."""
    home = syncline._HOME.get(name, "errors")
    for chapter, modules in _CHAPTERS.items():
        for number, module in enumerate(modules):
            if home == module or home.startswith(f"{module}."):
                return chapter, number
    return _OTHERS, 0


def _entry(name: str) -> str:
    entry = f"::: syncline.{name}" + _SHOWN.get(name, "")
    if name == "RunConfig":
        return f"{entry}\n\n{_settings()}"
    if name == "worker":  # what it returns is what one works with
        return f"{entry}\n\n::: syncline.workers.own_loop.Worker" + _SHOWN["Worker"]
    return entry


def _settings() -> str:
    defaults = {f.name: f.default for f in dataclasses.fields(RunConfig)}
    rows = [f"| `{name}` | `{defaults[name]!r}` | {said} |" for name, said in describe(RunConfig).items()]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])
