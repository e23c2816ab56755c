"""TensorFlow's MultiWorkerMirroredStrategy with a training loop of its own, each worker in its own process."""

import json
import os

from peer_protocol import CLASSES, LR, MOMENTUM, arguments, samples, start_ranks, timed


def environment(rank, asked):
    hosts = [f"127.0.0.1:{asked.port + number}" for number in range(asked.workers)]
    cluster = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
    return {**os.environ, "TF_CONFIG": json.dumps(cluster)}


def train(asked):
    import numpy as np
    import tensorflow as tf
    import tf_keras as keras

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)  # one computes; with 1 it would also wait for the others
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == asked.workers, f"{strategy.num_replicas_in_sync} replicas"
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(6, 5, padding="same", activation="relu", input_shape=(28, 28, 1)),
                keras.layers.MaxPool2D(2),
                keras.layers.Conv2D(16, 5, activation="relu"),
                keras.layers.MaxPool2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(120, activation="relu"),
                keras.layers.Dense(84, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        optimizer = keras.optimizers.legacy.SGD(LR, momentum=MOMENTUM)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    assert model.count_params() == 61706
    images, labels = samples(asked.rank, asked.batch)
    images = tf.constant(np.ascontiguousarray(np.moveaxis(images, 2, -1)))  # channels last, as TensorFlow likes it
    labels = tf.constant(labels)
    all_images = asked.batch * asked.workers

    def replica(number):
        with tf.GradientTape() as tape:
            loss = loss_of(labels[number], model(images[number], training=True)) / all_images
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905  # as long as each other
        return loss

    @tf.function
    def step(number):
        return strategy.run(replica, args=(number,))

    numbers = [tf.constant(number) for number in range(len(images))]
    timed(lambda number: step(numbers[number]), asked, rank=asked.rank, version=tf.__version__)


if __name__ == "__main__":
    asked = arguments()
    if asked.rank is None:
        start_ranks(asked.workers, lambda rank: environment(rank, asked))
    else:
        train(asked)
