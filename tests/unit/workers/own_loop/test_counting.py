"""`enumerate` in a script: training batches have the numbers that they have in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from syncline.workers.own_loop.counting import NumberedBatches, count_batches, enumerate_batches


class Batches(NumberedBatches):
    """The batches 5, 6 and 7 of an epoch; a replacement has missed the others."""

    def __init__(self, *, trains: bool = True) -> None:
        self.number, self.trains = 4, trains

    def is_numbered(self) -> bool:
        return self.trains

    def last_number(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[str]:
        for name in "abc":
            self.number += 1
            yield name


class Bar:
    """A progress bar around something, as tqdm is."""

    def __init__(self, iterable: Batches) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[str]:
        return iter(self.iterable)


def test_training_batches_have_the_numbers_of_their_epoch():
    assert list(enumerate_batches(Batches())) == [(5, "a"), (6, "b"), (7, "c")]
    assert list(enumerate_batches(Batches(), 1)) == [(6, "a"), (7, "b"), (8, "c")]
    assert list(enumerate_batches(Bar(Batches()))) == [(5, "a"), (6, "b"), (7, "c")]


def test_everything_else_is_numbered_as_python_does():
    assert list(enumerate_batches(Batches(trains=False))) == [(0, "a"), (1, "b"), (2, "c")]
    assert list(enumerate_batches("ab", start=3)) == [(3, "a"), (4, "b")]
    layers = torch.nn.ModuleList([torch.nn.Identity()])
    assert list(enumerate_batches(layers)) == [(0, layers[0])]


def test_only_the_script_and_modules_beside_it_get_it(monkeypatch, tmp_path):
    found = {}
    for name, folder in {"__main__": tmp_path, "beside": tmp_path, "elsewhere": tmp_path / "other"}.items():
        module = found[name] = ModuleType(name)
        module.__file__ = str(folder / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "elsewhere.py").symlink_to(tmp_path / "other" / "elsewhere.py")
    found["linked"] = linked = ModuleType("linked")
    linked.__file__ = str(tmp_path / "elsewhere.py")
    monkeypatch.setitem(sys.modules, "linked", linked)
    found["own"] = ModuleType("own")
    found["own"].__dict__.update(__file__=str(tmp_path / "own.py"), enumerate=zip)
    monkeypatch.setitem(sys.modules, "own", found["own"])
    count_batches()
    given = {name: vars(module).get("enumerate") for name, module in found.items()}
    assert given == {
        "__main__": enumerate_batches,
        "beside": enumerate_batches,
        "elsewhere": None,
        "linked": None,
        "own": zip,
    }
