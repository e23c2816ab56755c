"""Layers as text: what is written is what is read, and its line is found."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from syncline.models.declared.call import Call
from syncline.models.declared.read import array_lines, layer_table_lines

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
calls = st.builds(Call, names, st.lists(values, max_size=3).map(tuple), st.dictionaries(names, values, max_size=3))


@given(calls)
def test_the_text_of_a_call_is_read_as_the_same_call(call):
    if any(name in ("from", "is", "in", "if", "or", "and", "not", "as", "for", "def", "del", "try", "pass", "else",
                    "elif", "with", "while", "class", "return", "yield", "import", "raise", "global", "lambda",
                    "assert", "except", "finally", "nonlocal", "continue", "break", "async", "await", "none", "true",
                    "false") for name in call.options):  # fmt: skip
        return  # Python's own words cannot name an option in this form; a table takes them
    assert Call.parse(str(call)) == call


pieces = st.sampled_from(["'relu'", '"a, [b] # \\" c"', "{ layer = 'x', from = ['a', 'b'] }", "'conv(1, [2])'"])
breaks = st.sampled_from(["", "\n", " # a [comment], with 'signs'\n", "\n\n"])


@given(st.lists(st.tuples(breaks, pieces, breaks), min_size=1, max_size=6), st.integers(0, 3))
def test_the_lines_of_the_elements_of_an_array_are_found(elements, blank):
    text, expected = "\n" * blank + "[model]\nlayers = [", []
    for before, piece, after in elements:
        text += before
        expected.append(text.count("\n") + 1)
        text += piece + after + ","
    text += "]\nepochs = 3\n"
    assert len(tomllib.loads(text)["model"]["layers"]) == len(elements)
    assert array_lines(text) == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_the_lines_of_tables_are_found(gaps):
    text, expected = "", []
    for gap in gaps:
        text += "\n" * gap
        expected.append(text.count("\n") + 1)
        text += '[[model.layers]]\nlayer = "relu"\n'
    assert layer_table_lines(text) == expected
