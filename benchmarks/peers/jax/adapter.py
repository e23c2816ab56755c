"""JAX with one process per worker: the batch is sharded over a mesh, and XLA puts in the all-reduce, on gloo."""

from peer_protocol import CLASSES, LR, MOMENTUM, arguments, samples, start_ranks, timed


def train(asked):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{asked.port}", num_processes=asked.workers, process_id=asked.rank)
    mesh = Mesh(np.array(jax.devices()), ("workers",))
    assert len(jax.devices()) == asked.workers, f"JAX has {len(jax.devices())} devices"
    everywhere, shared = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("workers"))

    def parameters():
        random = np.random.RandomState(0)
        shapes = [(5, 5, 1, 6), (5, 5, 6, 16), (400, 120), (120, 84), (84, CLASSES)]
        weights = [(random.standard_normal(s) / np.sqrt(np.prod(s[:-1]))).astype(np.float32) for s in shapes]
        return [(w, np.zeros(w.shape[-1], np.float32)) for w in weights]

    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def loss_of(parameters, images, labels):
        x = images
        for (weight, bias), padding in zip(parameters[:2], ("SAME", "VALID"), strict=True):
            x = jax.lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = pooled(jax.nn.relu(x + bias))
        x = x.reshape(len(x), -1)
        for weight, bias in parameters[2:-1]:
            x = jax.nn.relu(x @ weight + bias)
        weight, bias = parameters[-1]
        logits = jax.nn.log_softmax(x @ weight + bias)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

    @jax.jit
    def updated(state, images, labels):
        parameters, momenta = state
        gradients = jax.grad(loss_of)(parameters, images, labels)
        momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, gradients)
        return jax.tree.map(lambda p, m: p - LR * m, parameters, momenta), momenta

    state = (parameters(), [(np.zeros_like(w), np.zeros_like(b)) for w, b in parameters()])
    assert sum(w.size + b.size for w, b in state[0]) == 61706
    state = jax.device_put(state, everywhere)
    images, labels = samples(asked.rank, asked.batch)
    data = [
        tuple(jax.make_array_from_process_local_data(shared, array) for array in batch)
        for batch in zip(np.moveaxis(images, 2, -1), labels.astype(np.int32), strict=True)
    ]

    def step(number):
        nonlocal state
        state = updated(state, *data[number])

    timed(step, asked, rank=asked.rank, version=jax.__version__, finish=lambda: jax.block_until_ready(state))
    jax.distributed.shutdown()


if __name__ == "__main__":
    asked = arguments()
    if asked.rank is None:
        start_ranks(asked.workers)
    else:
        train(asked)
