"""How long one exchange takes: a strategy's traffic over a network.

With n members, S bytes sent by each, latency a, k workers of a host on its link of B bytes/s, and p servers:

    all-reduce    4 (n - 1) a + 2 (n - 1)/n k S/B        gloo's ring; its latency term is twice the usual one
    all-gather    2 (n - 1) a + (n - 1) k S/B            lengths first, then payloads
    peers         a + k S/B                              S counts a buffer once for each receiver
    servers       2 a + max(r/p, k) S/B + max(r/p, k) pulled/B
                                                         the servers' links or the workers', whichever is slower

A server runs on the host of one of the workers, so r = n - k workers reach it over its link. Where all wait for each
other, all push and then all pull; elsewhere pushes and pulls of different workers share a link in both directions.
    broadcast     log2(n) a + S/B

Inside a host with shared memory the same forms hold with the rounds and rates that were measured there.
Here: pure functions. Not here: what workers do meanwhile, and who waits (`step.py`).
"""

from __future__ import annotations

import math

from syncline.planning.cost.network import HostRates, Network
from syncline.planning.cost.ranges import ZERO, Range
from syncline.strategies.how import Exact
from syncline.strategies.traffic import Traffic


def exchange_s(traffic: Traffic, workers: int, network: Network) -> Range:
    """The time of one exchange, as seen by a worker that takes part in it."""
    members = traffic.members or workers
    if members < 2 and traffic.pattern != "servers":
        return ZERO
    if network.is_one_host or traffic.place == "inside-host":
        return _inside_host(traffic, members, workers, network)
    return _between_hosts(traffic, members, workers, network)


def _between_hosts(traffic: Traffic, n: int, workers: int, network: Network) -> Range:
    # Across hosts, only one worker of each exchanges; otherwise all workers of a host share its link.
    per_host = 1 if traffic.place == "across-hosts" else math.ceil(workers / network.hosts)
    sent, link = traffic.sent_bytes, network.link
    match traffic.pattern:
        case "all-reduce":
            return link.seconds(2 * (n - 1) / n * per_host * sent, 4 * (n - 1))
        case "all-gather":
            return link.seconds((n - 1) * per_host * sent, 2 * (n - 1))
        case "peers":
            return link.seconds(per_host * sent, 1)
        case "broadcast":
            return link.seconds(sent, math.log2(n))
        case "servers":
            reach = _reaching(traffic, n, network) if traffic.waits == "all" else 1 / traffic.shards
            busiest = max(reach, per_host)
            there, back = link.seconds(busiest * sent, 1), link.seconds(busiest * traffic.received_bytes, 1)
            return there + back + server_s(traffic, 1, network.rates)


def _reaching(traffic: Traffic, n: int, network: Network) -> float:
    """How many workers' buffers cross the link of a server's host: those of the workers on other hosts."""
    others = n - n / network.hosts
    servers_of_a_host = math.ceil(traffic.shards / network.hosts)
    return others * servers_of_a_host / traffic.shards


def _inside_host(traffic: Traffic, n: int, workers: int, network: Network) -> Range:
    rates = network.rates
    crowd = max(1.0, math.ceil(workers / network.hosts) / network.cores)
    """More workers than cores add up one after another."""
    if traffic.pattern == "servers":
        return server_s(traffic, n if traffic.waits == "all" else 1, rates) * (crowd if traffic.waits == "all" else 1)
    moved = {"all-gather": float(n), "peers": 2.0, "all-reduce": 1.0, "broadcast": 1.0}[traffic.pattern]
    if traffic.pattern == "peers":
        moved = 1 + 1 / max(traffic.receivers, 1e-9)  # it reads what each sends, and writes its own once
    return (rates.memory_round_s + rates.memory_s_per_byte * (moved * traffic.sent_bytes)) * crowd


def server_s(traffic: Traffic, requests: int, rates: HostRates) -> Range:
    """How long a server is busy with the pushes and pulls of so many workers, and they with it."""
    both = traffic.sent_bytes + traffic.received_bytes
    return rates.server_round_s * 2 + rates.server_s_per_byte * (requests * both / traffic.shards)


def coding_s(traffic: Traffic, workers: int, numbers: int, rates: HostRates) -> Range:
    """Encoding what a worker sends, and decoding what it gets, in one exchange."""
    if traffic.encoding == Exact():
        return ZERO
    once = rates.coding_s.get(str(traffic.encoding), rates.coding_s_per_number * numbers)
    members = traffic.members or workers
    return once * (1 + members if traffic.pattern == "all-gather" else 1)


def saturated_s(traffic: Traffic, workers: int, network: Network) -> Range:
    """The shortest time between two exchanges of a worker that servers, or their links, keep up with."""
    if traffic.pattern != "servers":
        return ZERO
    both = traffic.sent_bytes + traffic.received_bytes
    busy = network.rates.server_s_per_byte * (workers * both / traffic.shards)
    if network.is_one_host:
        return busy
    larger = max(traffic.sent_bytes, traffic.received_bytes)
    on_links = network.link.seconds(_reaching(traffic, workers, network) * larger, 0)
    return busy.most(on_links)
