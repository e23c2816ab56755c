"""JAX's parts: jax.nn. Layers, losses, metrics and optimizers are in other packages, such as flax and optax."""

import inspect

import jax
from peer_protocol import print_event

OTHER_FUNCTIONS = {  # of jax.nn, which its documentation does not call activations
    "softmax", "log_softmax", "logmeanexp", "logsumexp", "standardize", "one_hot", "dot_product_attention",
    "scaled_matmul", "get_scaled_dot_general_config", "scaled_dot_general",
}  # fmt: skip


def functions(module):
    """Different public functions; aliases of one function count once."""
    found = {}
    for name, value in inspect.getmembers(module, callable):
        if name[0] != "_" and not inspect.isclass(value):
            found.setdefault(id(value), name)
    return sorted(found.values())


parts = {
    "activations": [name for name in functions(jax.nn) if name not in OTHER_FUNCTIONS],
    "initializers": functions(jax.nn.initializers),
}
print_event(event="parts", version=jax.__version__, parts=parts)
