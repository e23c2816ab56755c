"""How rows are cut into pieces for scoring: none is left out, none is in two pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.serving.scoring.pieces import pieces_of

FILES = st.lists(st.lists(st.integers(0, 200), max_size=5), max_size=5)


@given(files=FILES, most_rows=st.integers(1, 90))
def test_every_row_is_in_exactly_one_piece(files: list[list[int]], most_rows: int) -> None:
    rows = [(p.file, p.group, row) for p in pieces_of(files, most_rows) for row in range(p.start, p.stop)]
    expected = [(f, g, row) for f, groups in enumerate(files) for g, count in enumerate(groups) for row in range(count)]
    assert rows == expected


@given(files=FILES, most_rows=st.integers(1, 90))
def test_pieces_have_different_names_in_the_order_of_the_input(files: list[list[int]], most_rows: int) -> None:
    pieces = list(pieces_of(files, most_rows))
    names = [piece.name for piece in pieces]
    assert names == sorted(set(names))
    assert all(0 < piece.rows <= most_rows for piece in pieces)
