"""Streams: the same batches for any number of workers, and a clear error where that is impossible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from syncline.data import stream_order
from syncline.data.assignment import Position
from syncline.data.packing import packed, unpacked
from syncline.data.prefetch import Fetched, prefetched
from syncline.data.stream import checksum_of
from syncline.data.stream_order import stream_of
from syncline.errors import ConfigError, DataError

COUNT = 23
START = Position()


class Numbered(IterableDataset[Any]):
    """The numbers of a range, divided among loader processes as torch's documentation does."""

    def __init__(self, start: int = 0, end: int = COUNT) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        step = info.num_workers if info is not None else 1
        return iter(range(self.start + (info.id if info is not None else 0), self.end, step))


class Known(Numbered):
    def __len__(self) -> int:
        return COUNT


class Shuffled(Known):
    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        for number in torch.randperm(COUNT).tolist():
            yield number, torch.rand(2)


class Divided(Known):
    """A stream that `worker_init_fn` divides."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.end))


def divide(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.start, dataset.end = (0, 10) if number == 0 else (10, COUNT)


def read(loader: DataLoader[Any], rank: int, size: int, start: Position = START) -> list[Fetched]:
    order, source = stream_of(loader, 3, lambda _: None)
    shares = order.shares(start, rank=rank, size=size, epochs=2)
    with prefetched(source, shares, samples=5, loaders=1, seed=3) as found:
        return list(found)


def numbers(fetched: Fetched) -> list[int]:
    data = fetched.data[0] if isinstance(fetched.data, list) else fetched.data
    return data.tolist()[: len(fetched.share.indices)]


@pytest.mark.parametrize(
    "settings", [{}, {"num_workers": 2}, {"drop_last": True}], ids=["inline", "two loader processes", "drop_last"]
)
def test_workers_together_get_the_samples_that_the_loader_serves_in_one_process(settings):
    of_loader: list[int] = torch.cat(list(DataLoader(Numbered(), batch_size=5, **settings))).tolist()
    alone = [numbers(f) for f in read(DataLoader(Numbered(), batch_size=5, **settings), 0, 1)]
    assert list(itertools.chain(*alone)) == of_loader * 2
    together = zip(*(read(DataLoader(Numbered(), batch_size=5, **settings), rank, 3) for rank in range(3)), strict=True)
    for whole, parts in zip(alone, together, strict=True):
        assert [n for part in parts for n in numbers(part)] == whole
        assert len({part.share.checksum for part in parts}) == 1


def test_a_worker_init_fn_that_divides_the_dataset_works_as_in_torch():
    settings: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "worker_init_fn": divide}
    of_loader = torch.cat(list(DataLoader(Divided(), **settings))).tolist()
    assert [n for f in read(DataLoader(Divided(), **settings), 0, 1)[:5] for n in numbers(f)] == of_loader


def test_a_random_stream_is_the_same_from_the_middle_and_another_in_the_next_epoch():
    def collate(items: list[Any]) -> Any:
        return [torch.tensor([n for n, _ in items]), torch.stack([x for _, x in items]) + torch.rand(1)]

    whole = read(DataLoader(Shuffled(), batch_size=5, collate_fn=collate), 0, 2)
    rest = read(DataLoader(Shuffled(), batch_size=5, collate_fn=collate), 0, 2, Position(0, 10, 2))
    assert [numbers(f) for f in whole[2:]] == [numbers(f) for f in rest]
    assert all(torch.equal(a.data[1], b.data[1]) for a, b in zip(whole[2:], rest, strict=True))
    assert [numbers(f) for f in whole[:5]] != [numbers(f) for f in whole[5:]]
    other = read(DataLoader(Shuffled(), batch_size=5), 1, 2)
    assert [f.share.checksum for f in other] == [f.share.checksum for f in whole], "collating draws no random numbers"


def test_different_samples_have_different_checksums():
    batches: list[list[Any]] = [
        [torch.zeros(3), 1], [torch.ones(3), 1], [torch.zeros(3), 2], [{"text": "a"}], [{"text": "b"}], ["a"], [b"c"],
    ]  # fmt: skip
    assert len({checksum_of(batch) for batch in batches}) == len(batches)
    assert checksum_of([torch.zeros(0), object()]) == checksum_of([torch.zeros(0), object()])


def test_samples_are_the_same_after_packing():
    tensors = [torch.rand(3), torch.rand(2, 3).T, torch.tensor(2), torch.zeros(0, 2), torch.rand(2).bfloat16()]
    data = {"tensors": tensors, "text": "a", "weight": torch.nn.Parameter(torch.rand(2))}
    found = unpacked(packed(data))
    assert found["text"] == "a"
    assert found["weight"].requires_grad
    for before, after in zip(tensors, found["tensors"], strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    found["tensors"][0].add_(1)


def test_a_stream_that_ends_before_its_length_or_changes_it_is_an_error():
    class Short(Known):
        def __len__(self) -> int:
            return COUNT + 1

    class Longer(Numbered):
        def set_epoch(self, epoch: int) -> None:
            self.end = COUNT + epoch

    for dataset, epoch in ((Short(), 0), (Longer(), 1)):
        with pytest.raises(DataError) as raised:
            read(DataLoader(dataset, batch_size=5), 0, 2)
        assert raised.value.code == "stream-length"
        assert raised.value.facts["epoch"] == epoch


def test_a_declared_length_makes_an_epoch_of_an_endless_stream():
    class Endless(Known):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    warnings: list[str] = []
    order, source = stream_of(DataLoader(Endless(), batch_size=5), 3, warnings.append)
    shares = order.shares(Position(), rank=0, size=1, epochs=1)
    with prefetched(source, shares, samples=5, loaders=1, seed=3, warn=warnings.append) as found:
        assert [n for f in found for n in numbers(f)] == list(range(COUNT))
    assert len(warnings) == 1
    assert str(COUNT) in warnings[0]


class EndlessUncounted(Numbered):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Empty(Numbered):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "code"),
    [
        (DataLoader(EndlessUncounted(), batch_size=5), "endless-stream"),
        (DataLoader(Numbered(), batch_size=None), "no-batches"),
        (DataLoader(Known(), batch_size=50, drop_last=True), "drop-last"),
        (DataLoader(Empty(), batch_size=5), "no-samples"),
    ],
    ids=["endless", "without batches", "everything dropped", "empty"],
)
def test_a_stream_that_cannot_be_numbered_is_refused_before_the_training(monkeypatch, loader, code):
    monkeypatch.setattr(stream_order, "MOST_SAMPLES", 1000)
    with pytest.raises(ConfigError) as raised:
        stream_of(loader, 3, lambda _: None)
    assert raised.value.code == code


def test_an_error_of_the_dataset_names_the_sample():
    class Broken(Known):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)
            raise ValueError("cannot be parsed")

    with pytest.raises(ValueError, match="cannot be parsed") as raised:
        read(DataLoader(Broken(), batch_size=5), 0, 2)
    assert "sample 5 of epoch 0" in str(raised.value)
