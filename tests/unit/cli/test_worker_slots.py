"""`syncline worker`: its slot from torchrun, Slurm or MPI, and its address and secret."""

from __future__ import annotations

import pytest

from syncline.cli.worker import join, slot_from
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "slot"),
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
def test_the_slot_is_the_rank_that_the_launcher_gave(environment, slot):
    assert slot_from(environment) == slot


def test_a_missing_secret_or_an_invalid_address_is_named(monkeypatch):
    monkeypatch.delenv("SYNCLINE_SECRET", raising=False)
    with pytest.raises(ConfigError, match="SYNCLINE_SECRET is not set"):
        join("127.0.0.1:7077", reached_at=None, patience_s=1)
    with pytest.raises(ConfigError, match=r"--join is 'somewhere'.*HOST:PORT"):
        join("somewhere", reached_at=None, patience_s=1)
