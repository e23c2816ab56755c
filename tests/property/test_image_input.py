"""Images of any size and content become inputs of the right shape, and where the ink is makes no difference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from syncline.data.image_input import read_image

GRAY = st.tuples(st.integers(1, 40), st.integers(1, 40)).flatmap(lambda shape: arrays(np.uint8, shape))


def read(pixels: np.ndarray, shape: tuple[int, int, int], *, is_handwriting: bool) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.png"
        Image.fromarray(pixels).save(path)
        return read_image(path, shape, is_handwriting=is_handwriting)


@given(pixels=GRAY, side=st.sampled_from([8, 28]), is_handwriting=st.booleans())
def test_a_image_becomes_floats_from_0_to_1_in_the_shape_of_the_data(pixels, side, is_handwriting):
    found = read(pixels, (1, side, side), is_handwriting=is_handwriting)
    assert found.shape == (1, side, side)
    assert found.dtype == np.float32
    assert 0 <= found.min() <= found.max() <= 1


@given(
    top=st.integers(2, 20), left=st.integers(2, 20), height=st.integers(3, 25), width=st.integers(3, 25),
    paper=st.integers(170, 255), ink=st.integers(0, 100),
)  # fmt: skip
def test_where_the_ink_is_and_whether_it_is_dark_or_light_makes_no_difference(top, left, height, width, paper, ink):
    page = np.full((60, 50), paper, np.uint8)
    page[top : top + height, left : left + width] = ink
    elsewhere = np.full((50, 60), paper, np.uint8)
    elsewhere[3 : 3 + height, 5 : 5 + width] = ink
    one = read(page, (1, 28, 28), is_handwriting=True)
    assert np.allclose(one, read(elsewhere, (1, 28, 28), is_handwriting=True), atol=0.01)
    assert np.allclose(one, read(255 - page, (1, 28, 28), is_handwriting=True), atol=0.01)
