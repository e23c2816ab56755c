"""Every code block of the README and the documentation is run, or says why not."""

from __future__ import annotations

import textwrap

import pytest
from page_blocks import Block, blocks_of
from running_pages import ROOT, Reader, check_unrun
from small_syncline import smaller

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_every_block_of_the_page_runs(name, tmp_path):
    blocks = blocks_of((ROOT / name).read_text())
    ran = Reader(name, tmp_path).try_out(blocks)
    assert ran == [block for block in blocks if block.is_code and block.not_run is None]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_run_says_why_and_is_well_formed(name):
    for block in blocks_of((ROOT / name).read_text()):
        if block.not_run is not None:
            assert len(block.not_run.split()) >= 3, f"{name}:{block.line}: say why it is not run"
            assert block.is_code, f"{name}:{block.line}: there is nothing to run, so it needs no mark"
            check_unrun(block)


def blocks(text: str) -> list[Block]:
    return blocks_of(textwrap.dedent(text))


def test_blocks_are_found_with_language_title_and_line():
    found = blocks(
        """
        Text.
        ```python title="a.py"
        x = 1
        ```
        - in a list

            ```sh
            ls
            ```
        <!-- not run: needs a cluster -->
        ```toml
        # b.toml
        a = 1
        ```
        ```
        output
        ```
        """
    )
    assert [(b.language, b.code, b.line, b.file_name, b.not_run) for b in found] == [
        ("python", "x = 1\n", 4, "a.py", None),
        ("sh", "ls\n", 9, None, None),
        ("toml", "# b.toml\na = 1\n", 13, "b.toml", "needs a cluster"),
        ("", "output\n", 17, None, None),
    ]


def test_a_mark_holds_for_the_next_block_only():
    found = blocks("<!-- not run: a reason -->\n```sh\nls\n```\n```sh\nls\n```\n")
    assert [b.not_run for b in found] == ["a reason", None]


def test_a_block_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"line 1: .* does not end"):
        blocks("```sh\nls\n")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("\n```sh\nfalse\ntrue\n```\n", "page.md:3: exit code 1"),
        ("```python\na = 1\n```\n\n```python\nassert a == 2\n```\n", "line 6, in <module>\n    assert a == 2"),
        ("```ruby\nputs 1\n```\n", "page.md:2: there is no way to run 'ruby'"),
        ('```toml\nmodel = "lenet"\ndata = "digits"\nworkerz = 2\n```\n', "Did you mean 'workers'?"),
    ],
)
def test_failures_are_reported_with_their_place_on_the_page(text, reported, tmp_path):
    with pytest.raises(AssertionError) as failure:
        Reader("page.md", tmp_path).try_out(blocks_of(text))
    assert reported in str(failure.value)


def test_a_titled_block_is_a_file_for_what_follows(tmp_path):
    page = '```python title="made.py"\nopen("ran", "w").close()\n```\n```sh\npython made.py && test -f ran\n```\n'
    assert len(Reader("page.md", tmp_path).try_out(blocks_of(page))) == 2


def test_a_titled_block_that_no_command_uses_is_run_by_itself(tmp_path):
    Reader("page.md", tmp_path).try_out(blocks_of('```python title="made.py"\nopen("ran", "w").close()\n```\n'))
    assert (tmp_path / "ran").exists()


def test_flags_of_commands_that_are_not_run_are_checked():
    good = Block("sh", "sudo syncline train my_run.toml --engine cluster   # a comment\n", 1, not_run="needs root here")
    check_unrun(good)
    with pytest.raises(Exception, match="--engin"):
        check_unrun(Block("sh", "syncline train my_run.toml --engin ray\n", 1, not_run="needs a cluster"))
    with pytest.raises(AssertionError, match="no engine 'rays'"):
        check_unrun(Block("sh", "syncline train my_run.toml --engine rays\n", 1, not_run="needs a cluster"))
    with pytest.raises(AssertionError, match="no command 'trane'"):
        check_unrun(Block("sh", "syncline trane my_run.toml\n", 1, not_run="needs a cluster"))


def test_commands_are_made_smaller_and_nothing_else():
    assert smaller(["train", "lenet", "--data", "mnist", "--workers", "4"]) == [
        "train", "--max-steps", "3", "--evaluate-every", "0", "lenet", "--data", "digits", "--workers", "4",
    ]  # fmt: skip
    assert smaller(["explain", "lenet", "-d", "mnist"]) == ["explain", "lenet", "-d", "digits"]
    assert smaller([]) == []
