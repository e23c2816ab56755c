"""One worker's part of a divided graph, in a View.

Here: `GraphDivision`: it divides the graph among the members, opens the exchange of halos, and says which of a step's
nodes are this worker's. All members compute a step's samples together, as the slices of a tensor layout do: each has
the loss of its own nodes, and the sum of their gradients is that of the step. Not here: the division itself
(`graphs/partition.py`), the rows that travel (`comms/halo_exchange.py`), the network (`models/graph_networks/`).
"""

from __future__ import annotations

from typing import Any

import torch

from syncline.comms.halo_exchange import HaloExchange
from syncline.data.order import Share
from syncline.graphs.halo import part_of, trades_of
from syncline.graphs.partition import Division, divide
from syncline.layouts.partitioned import Partitioned
from syncline.models.graph_networks.network import GraphNetwork
from syncline.telemetry.events import GraphDivided
from syncline.workers.build import Loss
from syncline.workers.forward import inputs_and_target, is_classification, loss_of
from syncline.workers.loss_tally import Local, LossTally
from syncline.workers.session import Session
from syncline.workers.stepper import Stepper


class GraphDivision:
    """Divides the graph of a run anew in each View; `settings` says how."""

    def __init__(self, session: Session, settings: Partitioned) -> None:
        self._session, self._settings = session, settings
        self._divisions: dict[int, Division] = {}
        self._model: GraphNetwork | None = None
        self._exchange: HaloExchange | None = None

    def enter_view(self, stepper: Stepper) -> None:
        """Take this worker's part among the members; they call this together."""
        session, model = self._session, stepper.replica.model
        assert isinstance(model, GraphNetwork), "the planner gives this layout to no other model"
        self._model, self._exchange = model, None
        stepper.replica.log.count_bytes(self._bytes_sent)
        session.recorder.count_inside = self._bytes_sent
        model.undivide()
        collective = session.collective
        if collective.size == 1:
            return
        graph = model.graph
        division = self._divisions.get(collective.size)
        if division is None:
            division = self._divisions[collective.size] = divide(graph, collective.size, self._settings.method)
        trades = trades_of(graph, division)
        self._exchange = HaloExchange(collective, trades, staleness=self._settings.staleness)
        part = part_of(graph, division, session.rank)
        model.divide(part, self._exchange, cuts_vertices=division.cuts_vertices)
        if session.rank == 0:
            report = division.report(graph)
            session.recorder.emit(
                GraphDivided(
                    view=session.view,
                    method=division.method,
                    staleness=self._settings.staleness,
                    parts=division.parts,
                    nodes=graph.size,
                    edges=graph.edge_count // 2,
                    balance=report["balance"],
                    cut_share=report["cut_share"],
                    copies=division.copies,
                )
            )

    @property
    def is_divided(self) -> bool:
        return self._exchange is not None

    def compute(self, stepper: Stepper, share: Share, batch: Any, loss: Loss, tally: LossTally) -> Local:
        """Forward and backward for this worker's nodes: their part in the mean over all nodes of the step."""
        model, exchange = self._model, self._exchange
        assert model is not None, "a View has been entered"
        assert exchange is not None, "the graph is divided"
        own, part = _own(model, batch)
        if part:
            value, output, target = loss_of(model, loss, own)
            tally.add(value, output, target, part)
            local = tally.result()
        else:  # none of the step's nodes; the other workers still need this one's values, and their gradients
            output = model(own[0])
            value = output.sum()
            has_accuracy = tally.with_accuracy and is_classification(output, own[1])
            local = Local(0.0, 0.0 if has_accuracy else None)
        self._session.recorder.mark("forward")
        stepper.exchange.before_backward(share.weight)
        torch.autograd.backward(value * (part or 1.0))
        self._session.recorder.mark("backward")
        if self._settings.staleness:
            stepper.replica.log.read_old(exchange.age or 0)
        return local

    def _bytes_sent(self) -> int:
        return 0 if self._exchange is None else self._exchange.bytes_sent


def _own(model: GraphNetwork, batch: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
    """This worker's nodes of a step and their targets, and their fraction of all."""
    (nodes,), target = inputs_and_target(batch)
    mine = model.owns(nodes)
    return (nodes[mine], target[mine]), float(mine.sum()) / len(nodes)
