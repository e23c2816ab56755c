"""What connects the workers: links between hosts as stated by the user, and memory inside a host as measured.

Here: the types, reading '100mbit,1ms', and the time that bytes take. Not here: how an exchange uses a link
(`exchange.py`), and measuring (`profile.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from syncline.errors import ConfigError
from syncline.planning.cost.ranges import Range

_PAYLOAD = 1448 / 1514
"""The part of an Ethernet frame that is data."""
_BURST_BYTES = 64 * 1024
"""What a link's queue takes at once before its rate limits it."""
_UNCERTAIN = 0.15
"""Ring all-reduces on links of a known rate were within this of the formula, with few exceptions."""
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
DEFAULT_NETWORK = "1gbit,100us"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of a host to the others."""

    bytes_per_s: float
    latency_s: float
    burst_bytes: float = _BURST_BYTES

    def seconds(self, sent_bytes: float, latencies: float) -> Range:
        """How long so many bytes take that leave a host in one exchange, with so many latencies one after another."""
        seconds = self.latency_s * latencies + max(0.0, sent_bytes - self.burst_bytes) / self.bytes_per_s
        return Range.around(seconds, _UNCERTAIN)


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """What exchanges inside one host cost: measured, or the ranges that were seen on other machines."""

    memory_round_s: Range = field(default_factory=lambda: Range(2e-5, 1e-4, 4e-4))
    """A round in which all workers meet, without the time of its bytes."""
    memory_s_per_byte: Range = field(default_factory=lambda: Range(4e-11, 1e-10, 2.5e-10))
    server_round_s: Range = field(default_factory=lambda: Range(3e-4, 8e-4, 2e-3))
    """A push or a pull, without the time of its bytes."""
    server_s_per_byte: Range = field(default_factory=lambda: Range(2e-10, 6e-10, 1.5e-9))
    """At a server, for each byte that it takes or gives."""
    coding_s: Mapping[str, Range] = field(default_factory=dict)
    """Seconds to encode, or to decode, all parameters, by encoding."""
    coding_s_per_number: Range = field(default_factory=lambda: Range(5e-10, 2e-9, 1e-8))
    """For an encoding that was not measured."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The hosts of a run and what connects them."""

    link: Link
    hosts: int = 1
    cores: int = 1
    """Of each host."""
    shares_memory: bool = True
    """Whether the workers of a host exchange through its memory."""
    rates: HostRates = field(default_factory=HostRates)

    @property
    def is_one_host(self) -> bool:
        return self.hosts == 1


def read_link(text: str) -> Link:
    """The link that `text` describes: a rate, a latency, or both, such as '100mbit,1ms'."""
    rate, latency_s = None, None
    for part in text.lower().split(","):
        found = _AMOUNT.fullmatch(part.strip())
        unit = found[2].removesuffix("/s") if found else ""
        if found and unit in _RATES and rate is None:
            rate = float(found[1]) * _RATES[unit]
        elif found and unit in _TIMES and latency_s is None:
            latency_s = float(found[1]) * _TIMES[unit]
        else:
            raise _unreadable(text)
    usual_rate, usual_latency_s = 1e9, 1e-4
    rate = usual_rate if rate is None else rate
    if rate <= 0:
        raise _unreadable(text)
    latency_s = usual_latency_s if latency_s is None else latency_s
    return Link(bytes_per_s=rate / 8 * _PAYLOAD, latency_s=latency_s)


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"--network {text!r} is no network. Write the rate of each host's link in kbit, mbit or gbit (per second), its "
        "latency in us, ms or s, or both, such as '100mbit,1ms' or '10gbit'.",
        code="network", value=text,
    )  # fmt: skip
