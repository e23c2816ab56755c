"""Links from a page to files of the repository that are no pages: in the repository they lead there, on the site they
are the file's name.
"""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)#:\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Called by MkDocs before it renders each page."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, source: str) -> str:
    """The text of a page at `source` below `docs/`; links that leave this folder become names."""

    def named(link: re.Match[str]) -> str:
        target = normpath(join("docs", dirname(source), link["target"]))
        if target.startswith("docs/"):
            return link[0]
        said = link["text"].strip("`")
        return f"`{target}`" if said in (target, link["target"]) else f"{link['text']} (`{target}`)"

    return _LINK.sub(named, markdown)
