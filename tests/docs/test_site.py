"""The documentation builds as a site, without a warning, and is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import syncline

pytestmark = pytest.mark.xdist_group("site")  # one process, because these tests share a fixture

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "hooks"))

import command_reference  # noqa: E402  # the hooks are files beside the pages, as MkDocs wants them
from doctest_blocks import with_blocks  # noqa: E402
from outside_links import without_outside_links  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What is on a page: its text, its headings' names, and what a browser would fetch for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.anchors, self.fetched = "", [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors += [given["id"]] if given.get("id") else []
        is_fetched = tag in ("script", "img", "iframe", "source") or (tag == "link" and given.get("rel") != "canonical")
        self.fetched += [given[key] for key in ("src", "href") if is_fetched and given.get(key)]

    def handle_data(self, data):
        self.text += data


def test_every_page_is_on_the_site(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert pages
    assert [page for page in pages if not (site / page.with_suffix(".html")).is_file()] == []


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        fetched = Page(path).fetched
        assert fetched, "its style sheet, at least"
        assert [url for url in fetched if re.match(r"(https?:)?//", url)] == [], path
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert not any(re.search(r"@import|url\([\"']?https?:", style) for style in styles)


def test_scripts_and_data_of_the_docs_folder_are_not_on_the_site(site):
    assert list(site.rglob("*.py")) == []
    assert not (site / "hooks").exists()


def test_every_command_is_in_the_reference_with_its_options(site):
    text = Page(site / "reference" / "commands.html").text
    names = [name for name, _ in command_reference.commands()]
    assert {"syncline train", "syncline cluster up"} <= set(names)
    assert [name for name in names if f"{name}" not in text] == []
    for _, command in command_reference.commands():
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if option not in text] == []


def test_every_public_name_is_in_the_reference_with_its_docstring(site):
    page = Page(site / "reference" / "python.html")
    homes = {anchor.rpartition(".")[2] for anchor in page.anchors}
    assert [name for name in (*syncline.__all__, "Estimator") if name not in homes] == []
    assert "Train model on data with many workers" in page.text
    assert "doctest:" not in page.text


def test_every_example_is_in_the_gallery_with_its_source(site):
    text = "".join(Page(site / "gallery.html").text.split())
    files = [path for suffix in ("py", "toml") for path in (ROOT / "examples").rglob(f"*.{suffix}")]
    assert files
    for path in files:
        last_line = path.read_text().splitlines()[-1]
        assert path.relative_to(ROOT).as_posix() in text
        assert "".join(last_line.split()) in text


@pytest.mark.parametrize(
    ("source", "markdown", "shown"),
    [
        ("a.md", "[b](b.md) [c](guides/c.md#d)", "[b](b.md) [c](guides/c.md#d)"),
        ("a.md", "[the list](../benchmarks/README.md)", "the list (`benchmarks/README.md`)"),
        ("guides/a.md", "[up](../b.md) [`examples/c.py`](../../examples/c.py)", "[up](../b.md) `examples/c.py`"),
        ("a.md", "[far](https://example.org/x) ![p](../p.png)", "[far](https://example.org/x) ![p](../p.png)"),
    ],
)
def test_links_out_of_the_documentation_become_names(source, markdown, shown):
    assert without_outside_links(markdown, source) == shown


def test_examples_of_docstrings_become_blocks_without_words_for_doctest():
    docstring = "One.\n\n>>> a = 1   # doctest: +SKIP\n>>> a\n1\n\nMore of it."
    assert with_blocks(docstring) == "One.\n\n```pycon\n>>> a = 1\n>>> a\n1\n```\n\nMore of it."
    assert with_blocks("No example: a >> b.") == "No example: a >> b."
