"""The cards of graph networks, as plain data. Not here: models of independent samples (`cards.py`)."""

from __future__ import annotations

from functools import partial

from syncline.models.zoo.model_card import ModelCard, ReferenceSize

_cora = partial(ReferenceSize, data="cora", input_shape=(1433,), classes=7)
_network = partial(
    ModelCard, takes="graph", loss="cross_entropy", schedule=None, metrics=("accuracy",), epochs=200, batch=1024
)

GRAPH_CARDS = {
    model.name: model
    for model in (
        _network(
            name="gcn",
            summary="Graph convolutional network: sums over neighbors, normalized by the degrees of both.",
            paper="Kipf & Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017",
            module="syncline.models.zoo.gcn",
            reference=_cora(parameters=23_063),
            options={"hidden": 16, "layers": 2, "dropout": 0.5, "double": False},
            optimizer={"name": "Adam", "lr": 0.01, "weight_decay": 5e-4},
        ),
        _network(
            name="sage",
            summary="GraphSAGE: a node's own values and the mean of its neighbors'; may draw some of them in training.",
            paper="Hamilton, Ying & Leskovec, Inductive Representation Learning on Large Graphs, NIPS 2017",
            module="syncline.models.zoo.sage",
            reference=_cora(parameters=184_391),
            options={"hidden": 64, "layers": 2, "dropout": 0.5, "double": False, "neighbors": 0},
            optimizer={"name": "Adam", "lr": 0.01, "weight_decay": 5e-4},
        ),
        _network(
            name="gat",
            summary="Graph attention network: sums over neighbors with learned weights, by several heads.",
            paper="Velickovic et al., Graph Attention Networks, ICLR 2018",
            module="syncline.models.zoo.gat",
            reference=_cora(parameters=92_373),
            options={"hidden": 8, "layers": 2, "heads": 8, "dropout": 0.6, "double": False},
            optimizer={"name": "Adam", "lr": 0.005, "weight_decay": 5e-4},
        ),
        _network(
            name="gin",
            summary="Graph isomorphism network: sums over neighbors, and a small perceptron in each layer.",
            paper="Xu, Hu, Leskovec & Jegelka, How Powerful are Graph Neural Networks?, ICLR 2019",
            module="syncline.models.zoo.gin",
            reference=_cora(parameters=100_553),
            options={"hidden": 64, "layers": 2, "dropout": 0.5, "double": False},
            optimizer={"name": "Adam", "lr": 0.01, "weight_decay": 5e-4},
        ),
    )
}
