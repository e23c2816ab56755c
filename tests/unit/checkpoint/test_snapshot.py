"""States that are saved where they are: no second copy, and the same content as a copy would have."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from syncline.checkpoint.snapshot import bytes_in, copied, in_place
from syncline.checkpoint.store import load, save


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def test_a_part_of_a_vector_becomes_a_tensor_with_memory_of_its_own_at_the_same_place():
    flat = torch.arange(100, dtype=torch.float32)
    part = flat[10:40].view(5, 6)
    own = in_place({"part": part})["part"]
    assert storage_of(own) == (part.data_ptr(), 30 * 4)
    assert torch.equal(own, part)
    flat.zero_()
    assert not own.any(), "it is the same memory"


def test_what_is_saved_in_place_is_what_a_copy_would_be(tmp_path):
    flat = torch.randn(500)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "half": flat[:200].to(torch.bfloat16).view(10, 20),
        "part": flat[200:300].view(10, 10),
        "channels last": image,
        "transposed": flat[:20].view(4, 5).t(),
        "with gaps": flat[::7],
        "expanded": flat[:3].expand(4, 3),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.randn(3)),
        "nested": [{"tuple": (flat[1:3], "text", 4)}],
        "ordered": OrderedDict(a=flat[5:9]),
    }
    one = load(save(tmp_path / "in place", 1, in_place(state), keep=1))
    other = load(save(tmp_path / "copied", 1, copied(state), keep=1))
    assert list(one) == list(other) == list(state)
    for name in ("nested", "ordered"):
        assert str(one[name]) == str(other[name])
    for name in [n for n in state if n not in ("nested", "ordered")]:
        mine, theirs = one[name], other[name]
        assert (mine.dtype, mine.layout, mine.shape) == (theirs.dtype, theirs.layout, theirs.shape)
        assert torch.equal(mine.to_dense(), theirs.to_dense()), name
        if mine.layout == torch.strided and mine.numel():
            assert mine.stride() == theirs.stride(), name


def test_a_file_has_only_the_parts_that_are_saved_and_tied_weights_once(tmp_path: Path):
    flat = torch.randn(1_000_000)
    weight = flat[:1000].view(10, 100)
    state = {"embedding": weight, "head": weight, "other": flat[1000:2000]}
    saved = save(tmp_path, 1, in_place(state), keep=1)
    assert 8_000 < saved.size_bytes < 12_000
    found = load(saved)
    assert torch.equal(found["embedding"], weight)
    assert found["embedding"].data_ptr() == found["head"].data_ptr()


def test_the_bytes_of_a_state_are_those_of_its_tensors():
    state = {"a": torch.empty(10), "b": [torch.empty(3, dtype=torch.int8), {"c": (torch.empty(2, 2),)}], "d": "text"}
    assert bytes_in(state) == 40 + 3 + 16
