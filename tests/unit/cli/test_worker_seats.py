"""Which of several processes this one is, as torchrun, Slurm and MPI tell it; and what `syncline worker` asks for."""

from __future__ import annotations

import pytest

from syncline.cli.worker import join, seat_from
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "seat"),
    [
        ({}, None),
        ({"RANK": "2", "LOCAL_RANK": "0"}, 2),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "1"}, 7),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"PMI_RANK": "0"}, 0),
        ({"RANK": "", "PMIX_RANK": "5"}, 5),
        ({"RANK": "first"}, None),
    ],
)
def test_the_seat_is_the_rank_that_was_given(environment, seat):
    assert seat_from(environment) == seat


def test_without_a_secret_or_an_address_it_says_what_to_write(monkeypatch):
    monkeypatch.delenv("SYNCLINE_SECRET", raising=False)
    with pytest.raises(ConfigError, match="SYNCLINE_SECRET is not set: without the run's secret nobody joins"):
        join("127.0.0.1:7077", reached_at=None, patience_s=1)
    with pytest.raises(ConfigError, match="write --join HOST:PORT"):
        join("somewhere", reached_at=None, patience_s=1)
