"""TensorFlow's parts, which are those of tf.keras."""

import inspect

import tensorflow as tf
from peer_protocol import print_event

keras = tf.keras
NO_ACTIVATIONS = {"get", "serialize", "deserialize"}


def classes(module, base):
    """Different public classes; aliases of one class count once, abstract ones do not."""
    found = {v for n, v in inspect.getmembers(module, inspect.isclass) if n[0] != "_" and issubclass(v, base)}
    return sorted({c.__name__ for c in found if c is not base})


activations = {f for n, f in inspect.getmembers(keras.activations, callable) if n not in NO_ACTIVATIONS}
parts = {
    "activations": sorted({f.__name__ for f in activations}),
    "metrics": classes(keras.metrics, keras.metrics.Metric),
    "initializers": classes(keras.initializers, keras.initializers.Initializer),
    "losses": classes(keras.losses, keras.losses.Loss),
    "layers": classes(keras.layers, keras.layers.Layer),
    "optimizers": classes(keras.optimizers, keras.optimizers.Optimizer),
    "regularizers": classes(keras.regularizers, keras.regularizers.Regularizer),
}
print_event(event="parts", version=tf.__version__, parts=parts)
