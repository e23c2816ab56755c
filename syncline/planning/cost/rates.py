"""What exchanges cost inside a host, read off the profile of a run that exchanged there. Pure.

Here: `rates_seen`, and the constants to begin with. Not here: what an exchange takes with such rates (`exchange.py`).
"""

from __future__ import annotations

import dataclasses

from syncline.planning.cost.network import HostRates
from syncline.planning.cost.profile import Profile
from syncline.planning.cost.ranges import Range
from syncline.strategies.how import Exact
from syncline.strategies.traffic import Traffic

_LOOPBACK_ROUND_S = Range(3e-4, 8e-4, 2e-3)
_LOOPBACK_S_PER_BYTE = Range(4e-10, 7e-10, 1.5e-9)
"""gloo between processes of one host, as it was measured for 2 workers."""


def loopback_rates() -> HostRates:
    """Where the workers of a host exchange through torch.distributed."""
    return HostRates(memory_round_s=_LOOPBACK_ROUND_S, memory_s_per_byte=_LOOPBACK_S_PER_BYTE)


def rates_seen(rates: HostRates, profile: Profile, traffic: tuple[Traffic, ...]) -> HostRates:
    """`rates` with those that a run with this traffic shows; unchanged if it shows none.

    It does if it had one kind of exchange, with everyone or with a server that it waited for, in every step.
    """
    exchange = profile.phases.get("exchange")
    if exchange is None or profile.workers < 2 or len(traffic) != 1:
        return rates
    (only,) = traffic
    if only.every != 1 or only.encoding != Exact() or only.is_hidden or only.members is not None:
        return rates
    if only.pattern == "all-reduce":
        round_s, per_byte = divided(exchange, rates.memory_round_s, only.sent_bytes)
        return dataclasses.replace(rates, memory_round_s=round_s, memory_s_per_byte=per_byte)
    if only.pattern == "servers" and only.waits == "all":
        both = (only.sent_bytes + only.received_bytes) / only.shards * profile.workers
        round_s, per_byte = divided(exchange * 0.5, rates.server_round_s, both / 2)
        return dataclasses.replace(rates, server_round_s=round_s, server_s_per_byte=per_byte)
    return rates


def divided(measured: Range, round_s: Range, moved_bytes: float) -> tuple[Range, Range]:
    """A measured exchange as a round, at most as long as is usual, and the time of its bytes."""
    least = round_s.mid if round_s.mid < measured.mid / 2 else measured.mid / 2
    rest = Range(max(0.0, measured.low - least), measured.mid - least, max(measured.mid, measured.high) - least)
    return Range.exactly(least), rest * (1 / max(moved_bytes, 1.0))
