"""Several exchanges as one, for a script with several optimizers.

Here: `ExchangeGroup`: what a checkpoint and a recovery ask of an exchange, asked of each. Each optimizer's updates use
its own exchange; what the group does not delegate is never called on it. Not here: the exchanges (`strategies/`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from syncline.comms.collective import Collective
from syncline.strategies.exchange import Exchange, LocalExchange, Replica


class ExchangeGroup(LocalExchange):
    """The exchanges of all optimizers; `replica` is that of the first."""

    def __init__(self, replica: Replica, exchanges: Sequence[Exchange]) -> None:
        super().__init__(replica)
        self._exchanges = list(exchanges)

    @property
    def is_asynchronous(self) -> bool:
        return any(exchange.is_asynchronous for exchange in self._exchanges)

    @property
    def recovery(self) -> Any:
        """They are all made by one method."""
        return self._exchanges[0].recovery

    def before_forward(self) -> None:
        for exchange in self._exchanges:
            exchange.before_forward()

    @property
    def is_complete(self) -> bool:
        return all(exchange.is_complete for exchange in self._exchanges)

    def finish_updates(self, survivors: Collective) -> None:
        for exchange in self._exchanges:
            exchange.finish_updates(survivors)

    @contextmanager
    def shared(self) -> Iterator[None]:
        with ExitStack() as stack:
            for exchange in self._exchanges:
                stack.enter_context(exchange.shared())
            yield

    def private_state(self) -> dict[str, Any] | None:
        return _together([exchange.private_state() for exchange in self._exchanges])

    def load_private_state(self, state: dict[str, Any]) -> None:
        for exchange, own in zip(self._exchanges, state["exchanges"], strict=True):
            if own is not None:
                exchange.load_private_state(own)

    def carried_state(self) -> dict[str, Any] | None:
        return _together([exchange.carried_state() for exchange in self._exchanges])

    def replacement_state(self) -> dict[str, Any] | None:
        return _together([exchange.replacement_state() for exchange in self._exchanges])


def _together(states: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    return {"exchanges": states} if any(state is not None for state in states) else None
