"""LeNet-5 and SGD with momentum in NumPy. One process trains the batches of all workers as one."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from peer_protocol import CLASSES, LR, MOMENTUM, arguments, samples, timed


def windows(images):
    return sliding_window_view(images, (5, 5), axis=(2, 3))


def conv(images, weight, bias):
    return np.tensordot(windows(images), weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2) + bias[:, None, None]


def conv_backward(images, weight, gradient):
    of_weight = np.tensordot(gradient, windows(images), ((0, 2, 3), (0, 2, 3)))
    padded = np.pad(gradient, ((0, 0), (0, 0), (4, 4), (4, 4)))
    of_images = np.tensordot(windows(padded), weight[:, :, ::-1, ::-1], ((1, 4, 5), (0, 2, 3))).transpose(0, 3, 1, 2)
    return of_images, of_weight, gradient.sum((0, 2, 3))


def relu_pool(images):
    count, channels, height, width = images.shape
    blocks = np.maximum(images, 0).reshape(count, channels, height // 2, 2, width // 2, 2)
    return blocks, blocks.max((3, 5))


def relu_pool_backward(blocks, pooled, gradient):
    is_largest = (blocks == pooled[:, :, :, None, :, None]) & (blocks > 0)
    count, channels, height, _, width, _ = blocks.shape
    return (is_largest * gradient[:, :, :, None, :, None]).reshape(count, channels, 2 * height, 2 * width)


def gradients(parameters, images, labels):
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = parameters
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    blocks1, pooled1 = relu_pool(conv(padded, w1, b1))
    blocks2, pooled2 = relu_pool(conv(pooled1, w2, b2))
    flat = pooled2.reshape(len(images), -1)
    hidden1 = np.maximum(flat @ w3 + b3, 0)
    hidden2 = np.maximum(hidden1 @ w4 + b4, 0)
    scores = hidden2 @ w5 + b5
    g5 = np.exp(scores - scores.max(1, keepdims=True))
    g5 /= g5.sum(1, keepdims=True)
    g5[np.arange(len(labels)), labels] -= 1  # of the cross entropy
    g5 /= len(labels)
    g4 = (g5 @ w5.T) * (hidden2 > 0)
    g3 = (g4 @ w4.T) * (hidden1 > 0)
    g2 = relu_pool_backward(blocks2, pooled2, (g3 @ w3.T).reshape(pooled2.shape))
    of_pooled1, gw2, gb2 = conv_backward(pooled1, w2, g2)
    _, gw1, gb1 = conv_backward(padded, w1, relu_pool_backward(blocks1, pooled1, of_pooled1))
    return [gw1, gb1, gw2, gb2, flat.T @ g3, g3.sum(0), hidden1.T @ g4, g4.sum(0), hidden2.T @ g5, g5.sum(0)]


if __name__ == "__main__":
    asked = arguments()
    random, parameters = np.random.default_rng(0), []
    for shape, inputs, outputs in [
        ((6, 1, 5, 5), 25, 6), ((16, 6, 5, 5), 150, 16), ((400, 120), 400, 120), ((120, 84), 120, 84),
        ((84, CLASSES), 84, CLASSES),
    ]:  # fmt: skip
        weight = random.uniform(-1, 1, shape) / np.sqrt(inputs)
        parameters += [weight.astype(np.float32), np.zeros(outputs, np.float32)]
    images, labels = samples(0, asked.batch * asked.workers)
    momenta = [np.zeros_like(p) for p in parameters]

    def step(number):
        for p, m, g in zip(parameters, momenta, gradients(parameters, images[number], labels[number]), strict=True):
            m[...] = MOMENTUM * m + g
            p -= LR * m

    timed(step, asked, rank=0, version=np.__version__, parameters=sum(p.size for p in parameters))
