"""The model cards, as plain data.

Here: names, papers, sizes, and recommended training settings. Not here: the type (`model_card.py`), the
models (one file for each family, imported when built), the lookup by name (`registry.py`).
"""

from __future__ import annotations

from functools import partial

from syncline.models.zoo.model_card import ModelCard, ReferenceSize

_SCHEDULE = {"name": "OneCycleLR"}
_classifier = partial(ModelCard, loss="cross_entropy", schedule=_SCHEDULE, batch=128, metrics=("accuracy",))
_reconstruction = partial(ModelCard, target="input", loss="mse_loss", batch=128, metrics=())

_mnist = partial(ReferenceSize, data="mnist", input_shape=(1, 28, 28), classes=10)
_cifar10 = partial(ReferenceSize, data="cifar10", input_shape=(3, 32, 32), classes=10)
_shakespeare = partial(ReferenceSize, data="shakespeare", input_shape=(128,), classes=65, vocabulary=65)


def _sgd(lr: float) -> dict[str, object]:
    return {"name": "SGD", "lr": lr, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}


def _resnet(name: str, blocks: str, parameters: int) -> ModelCard:
    """Settings customary for CIFAR-10 and hundreds of epochs; examples/runs has some measured for a short run."""
    return _classifier(
        name=name,
        summary=f"ResNet-{name[6:]}, of {blocks} blocks, with a stem for small images or for large ones.",
        paper="He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, arXiv:1512.03385, 2015",
        module="syncline.models.zoo.resnet",
        reference=_cifar10(parameters=parameters),
        function=name,
        options={"width": 64, "stem": "cifar"},
        optimizer=_sgd(0.1),
        schedule={"name": "CosineAnnealingLR"},
        epochs=200,
    )


CARDS = {
    model.name: model
    for model in (
        _classifier(
            name="linear",
            summary="One linear layer on the flattened input: softmax regression.",
            paper="D. R. Cox, The Regression Analysis of Binary Sequences, J. Royal Statistical Society B 20(2), 1958",
            module="syncline.models.zoo.mlp",
            function="linear",
            reference=_mnist(parameters=7_850),
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9},
            schedule={"name": "CosineAnnealingLR"},
            epochs=10,
        ),
        _classifier(
            name="mlp",
            summary="Linear layers with ReLU between them, on the flattened input.",
            paper="Rumelhart, Hinton & Williams, Learning representations by back-propagating errors, Nature 323, 1986",
            module="syncline.models.zoo.mlp",
            reference=_mnist(parameters=235_146),
            options={"hidden": (256, 128)},
            optimizer={"name": "SGD", "lr": 0.1, "momentum": 0.9},
            schedule={"name": "CosineAnnealingLR"},
            batch=64,
            epochs=20,
        ),
        _classifier(
            name="lenet",
            summary="Two convolutions with pooling and two linear layers, as in Caffe's LeNet; images of any size.",
            paper="LeCun, Bottou, Bengio & Haffner, Gradient-based learning applied to document recognition, "
            "Proc. IEEE 86(11), 1998",
            module="syncline.models.zoo.lenet",
            reference=_mnist(parameters=431_080),
            # OneCycleLR warms up: at a constant start of 0.05 some seeds diverge within the first epoch.
            optimizer=_sgd(0.05),
            epochs=3,
        ),
        _resnet("resnet18", "basic", 11_173_962),
        _resnet("resnet34", "basic", 21_282_122),
        _resnet("resnet50", "bottleneck", 23_520_842),
        _classifier(
            name="alexnet",
            summary="Five convolutions and three linear layers with dropout, for images of 15 x 15 pixels or more.",
            paper="Krizhevsky, Sutskever & Hinton, ImageNet Classification with Deep Convolutional Neural Networks, "
            "NIPS 2012",
            module="syncline.models.zoo.alexnet",
            reference=_cifar10(parameters=29_983_114),
            options={"hidden": 4096, "dropout": 0.5},
            # Tried for 60 steps of MNIST with one seed, no longer: the loss fell from 5.3 to 1.0 in these. With the
            # paper's SGD, at rates of 0.001 to 0.01, it stayed near 2.3.
            optimizer={"name": "Adam", "lr": 0.0002},
            epochs=10,
        ),
        _classifier(
            name="vgg11",
            summary="Eight 3x3 convolutions, pooled five times, and three linear layers with dropout.",
            paper="Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, "
            "arXiv:1409.1556, 2014",
            module="syncline.models.zoo.vgg",
            reference=_cifar10(parameters=28_146_762),
            function="vgg11",
            options={"hidden": 4096, "dropout": 0.5, "batch_norm": True},
            optimizer=_sgd(0.05),
            epochs=30,
        ),
        _classifier(
            name="googlenet",
            summary="Nine Inception modules, with a stem for small images or for large ones.",
            paper="Szegedy et al., Going Deeper with Convolutions, arXiv:1409.4842, 2014",
            module="syncline.models.zoo.googlenet",
            reference=_cifar10(parameters=5_983_402),
            function="googlenet",
            options={"stem": "cifar", "dropout": 0.4},
            optimizer=_sgd(0.05),
            epochs=30,
        ),
        _classifier(
            name="lstm",
            summary="An LSTM for next-token prediction, or for classifying sequences, or images row by row.",
            paper="Hochreiter & Schmidhuber, Long Short-Term Memory, Neural Computation 9(8), 1997",
            module="syncline.models.zoo.lstm",
            reference=_shakespeare(parameters=148_801),
            options={"hidden": 128, "layers": 1},
            takes="both",
            optimizer={"name": "Adam", "lr": 0.003},
            epochs=5,
        ),
        _reconstruction(
            name="autoencoder",
            summary="Linear layers down to a narrow code and back up, trained to give back their input.",
            paper="Hinton & Salakhutdinov, Reducing the Dimensionality of Data with Neural Networks, "
            "Science 313(5786), 2006",
            module="syncline.models.zoo.autoencoder",
            reference=_mnist(parameters=2_837_314),
            options={"hidden": (1000, 500, 250, 30)},
            optimizer={"name": "Adam", "lr": 0.001},
            schedule=_SCHEDULE,
            epochs=10,
        ),
        _reconstruction(
            name="stacked-autoencoder",
            summary="An autoencoder that is trained layer by layer from the outside to the code, then as a whole.",
            paper="Bengio, Lamblin, Popovici & Larochelle, Greedy Layer-Wise Training of Deep Networks, NIPS 2006",
            module="syncline.models.zoo.stacked_autoencoder",
            reference=_mnist(parameters=2_837_314),
            options={"hidden": (1000, 500, 250, 30), "pretrain": 0.8},
            optimizer={"name": "Adam", "lr": 0.001},
            schedule=None,  # each stage is a training of its own
            epochs=10,
        ),
        ModelCard(
            name="destin",
            summary="Layers of nodes that cluster what they see and report beliefs, without labels or gradients.",
            paper="Arel, Rose & Coop, DeSTIN: A Scalable Deep Learning Architecture with Application to "
            "High-Dimensional Robust Pattern Recognition, AAAI Fall Symposium, 2009",
            module="syncline.models.zoo.destin",
            reference=_mnist(parameters=16_000),
            options={
                "grid": (8, 4, 2, 1),
                "centroids": 25,
                "shared": True,
                "training": "greedy",
                "memory": "none",
                "movements": 4,
                "sharpness": 4.0,
            },
            target="input",
            learns_by="sums",
            loss="mean_output",
            optimizer={"name": "ClusterRule"},
            schedule=None,
            batch=256,
            metrics=(),
            epochs=4,
        ),
        _classifier(
            name="transformer",
            summary="A small GPT: a decoder-only transformer for next-token prediction.",
            paper="Radford et al., Language Models are Unsupervised Multitask Learners, OpenAI, 2019; "
            "Vaswani et al., Attention Is All You Need, arXiv:1706.03762, 2017",
            module="syncline.models.zoo.transformer",
            reference=_shakespeare(parameters=826_368),
            options={"width": 128, "layers": 4, "heads": 4, "dropout": 0.0},
            takes="tokens",
            optimizer={"name": "AdamW", "lr": 0.002, "weight_decay": 0.1},
            batch=64,
            epochs=5,
        ),
    )
}
