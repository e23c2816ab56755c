"""The compiled convolutions, by both methods: what torch computes, for every shape, and nothing is touched that is not
theirs."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncline.compute.kernels import convolve
from syncline.compute.kernels.build import call, why_unavailable

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=f"no kernels here: {why_unavailable()}")

PRECISION: dict[convolve.Method, float] = {"plain": 1e-5, "winograd": 1e-4}
"""How far results may be from exact ones, as a part of the largest number in them."""
GUARD = 64
"""Floats before and after a result that must stay as they are."""


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def passes_of_torch(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of input, weight and bias, in double precision."""
    exact = nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, dtype=torch.float64
    )
    exact.load_state_dict(layer.state_dict())
    inputs = x.double().requires_grad_()
    output = exact(inputs)
    output.backward(dy.double())
    return [output.detach(), inputs.grad, exact.weight.grad, exact.bias.grad]


def passes_by_kernels(
    layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor, method: convolve.Method
) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            convolve.forward(layer, x, layer.weight, layer.bias, method),
            convolve.input_gradient(layer, x, dy, layer.weight, method),
            *convolve.weight_gradient(layer, x, dy, method),
        ]


def assert_gives_what_torch_gives(layer: nn.Conv2d, x: torch.Tensor, method: convolve.Method) -> None:
    assert convolve.is_applicable(layer, x, method)
    dy = torch.randn_like(layer(x))
    for ours, theirs in zip(passes_by_kernels(layer, x, dy, method), passes_of_torch(layer, x, dy), strict=True):
        assert ours.dtype == torch.float32
        scale, precision = theirs.abs().max().item(), PRECISION[method]
        torch.testing.assert_close(ours.double(), theirs, rtol=precision, atol=precision * max(scale, 1.0))


@st.composite
def layers_with_inputs(draw: st.DrawFn, method: convolve.Method) -> tuple[nn.Conv2d, torch.Tensor]:
    if method == "plain":
        kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        step = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    else:
        side = draw(st.sampled_from((3, 5)))
        kernel, step = (side, side), (1, 1)
    padding = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    sides = [max(1, size - 2 * pad) + draw(st.integers(0, 12)) for size, pad in zip(kernel, padding, strict=True)]
    torch.manual_seed(draw(st.integers(0, 9)))
    layer = nn.Conv2d(draw(st.integers(1, 20)), draw(st.integers(1, 40)), kernel, step, padding)
    x = torch.randn(draw(st.integers(1, 5)), layer.in_channels, *sides)
    return layer.to(memory_format=torch.channels_last), channels_last(x)


@settings(max_examples=100)
@given(layers_with_inputs("plain"))
def test_all_passes_give_what_torch_gives(given):
    assert_gives_what_torch_gives(*given, "plain")


@settings(max_examples=100)
@given(layers_with_inputs("winograd"))
def test_winograds_method_gives_what_torch_gives(given):
    assert_gives_what_torch_gives(*given, "winograd")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        pytest.param(nn.Conv2d(1, 20, 5), (7, 1, 28, 28), id="LeNet's first"),
        pytest.param(nn.Conv2d(20, 50, 5), (7, 20, 12, 12), id="LeNet's second"),
        pytest.param(nn.Conv2d(100, 30, 3, padding=1), (3, 100, 9, 9), id="runs that are longer than a panel is deep"),
        pytest.param(nn.Conv2d(16, 300, 3, padding=1), (2, 16, 5, 5), id="more outputs than a panel is deep"),
        pytest.param(
            nn.Conv2d(4, 6, 3, padding=1), (2, 4, 3, 500), id="a line with more pixels than are taken at once"
        ),
        pytest.param(nn.Conv2d(4, 6, 3), (1, 4, 40, 40), id="a sample with more pixels than are taken at once"),
        pytest.param(nn.Conv2d(64, 128, 1, stride=2), (3, 64, 8, 8), id="a shortcut"),
        pytest.param(nn.Conv2d(512, 64, 3, padding=1), (5, 512, 2, 2), id="the end of a ResNet"),
    ],
)
def test_shapes_at_which_the_work_is_cut_differently(layer, shape):
    torch.manual_seed(0)
    layer, x = layer.to(memory_format=torch.channels_last), channels_last(torch.randn(shape))
    assert_gives_what_torch_gives(layer, x, "plain")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        pytest.param(nn.Conv2d(20, 50, 5), (64, 20, 12, 12), id="LeNet's second, in several parts"),
        pytest.param(nn.Conv2d(64, 64, 3, padding=1), (3, 64, 32, 32), id="many tiles"),
        pytest.param(nn.Conv2d(300, 80, 3, padding=1), (2, 300, 4, 4), id="deep, and fewer tiles than weights"),
        pytest.param(nn.Conv2d(16, 300, 3, padding=1), (40, 16, 5, 5), id="more outputs than are summed up at once"),
        pytest.param(nn.Conv2d(300, 16, 5, padding=2), (40, 300, 5, 5), id="the same the other way round"),
        pytest.param(nn.Conv2d(1, 1, 3), (1, 1, 3, 3), id="one pixel"),
        pytest.param(nn.Conv2d(4, 6, 3, padding=5), (2, 4, 3, 3), id="tiles that lie wholly in the padding"),
    ],
)
def test_shapes_at_which_winograds_method_cuts_the_work_differently(layer, shape):
    torch.manual_seed(0)
    layer, x = layer.to(memory_format=torch.channels_last), channels_last(torch.randn(shape))
    assert_gives_what_torch_gives(layer, x, "winograd")


@pytest.mark.parametrize("method", PRECISION)
def test_weights_and_gradients_that_lie_otherwise_are_turned_around(method):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(5, 7, 3), channels_last(torch.randn(2, 5, 8, 8))
    dy = torch.randn(2, 7, 6, 6)
    assert not layer.weight.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(passes_by_kernels(layer, x, dy, method), passes_of_torch(layer, x, dy), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=PRECISION[method], atol=10 * PRECISION[method])


@pytest.mark.parametrize("method", PRECISION)
def test_the_same_input_gives_the_same_bits(method):
    layer, x = nn.Conv2d(20, 50, 5), channels_last(torch.randn(16, 20, 12, 12))
    dy = channels_last(torch.randn(16, 50, 8, 8))
    first, again = (passes_by_kernels(layer, x, dy, method) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def threads():
    """Set them; they are put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", [2, 3, 9])
@pytest.mark.parametrize("method", PRECISION)
def test_several_threads_share_the_samples(threads, method, number):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(5, 9, 3), channels_last(torch.randn(7, 5, 10, 10))
    dy = channels_last(torch.randn(7, 9, 8, 8))
    threads(1)
    alone = passes_by_kernels(layer, x, dy, method)
    threads(number)
    together, again = (passes_by_kernels(layer, x, dy, method) for _ in range(2))
    for one, several in zip(alone[:2], together[:2], strict=True):
        assert torch.equal(one, several), "each sample is computed as before"
    for one, several in zip(alone[2:], together[2:], strict=True):
        torch.testing.assert_close(one, several, rtol=PRECISION[method], atol=10 * PRECISION[method])
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        pytest.param(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), id="contiguous memory"),
        pytest.param(nn.Conv2d(3, 4, 3), channels_last(torch.randn(2, 3, 8, 8)).double(), id="double precision"),
        pytest.param(nn.Conv2d(3, 4, 3, dilation=2), channels_last(torch.randn(2, 3, 8, 8)), id="gaps in the kernel"),
        pytest.param(nn.Conv2d(3, 4, 3), channels_last(torch.randn(0, 3, 8, 8)), id="no samples"),
        pytest.param(nn.Conv2d(3, 4, 3), channels_last(torch.randn(2, 5, 8, 8)), id="other channels than the layer's"),
        pytest.param(nn.Conv2d(3, 4, 3), channels_last(torch.randn(2, 3, 2, 8)), id="an image that is too small"),
    ],
)
def test_what_is_not_for_them_is_left_to_torch(layer, x):
    assert not convolve.is_applicable(layer, x, "plain")
    assert not convolve.is_applicable(layer, x, "winograd")


@pytest.mark.parametrize("options", [{"kernel_size": 4}, {"kernel_size": (3, 5)}, {"kernel_size": 3, "stride": 2}])
def test_winograds_method_is_for_some_kernels_only(options):
    layer, x = nn.Conv2d(3, 4, **options), channels_last(torch.randn(2, 3, 8, 8))
    assert convolve.is_applicable(layer, x, "plain")
    assert not convolve.is_applicable(layer, x, "winograd")


class AtTheEnd:
    """Tensors whose last number is the last one before memory that may not be touched."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that lies so."""
        page = mmap.PAGESIZE
        size = tensor.numel() * tensor.element_size()
        whole = -(-size // page) * page
        memory = mmap.mmap(-1, whole + page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + whole), page, 0) == 0
        self._kept.append(memory)
        flat = torch.frombuffer(memory, dtype=torch.float32, count=tensor.numel(), offset=whole - size)
        if tensor.dim() != 4:
            copy = flat.view(tensor.shape)
        else:
            samples, channels, height, width = tensor.shape
            copy = flat.view(samples, height, width, channels).permute(0, 3, 1, 2)
        return copy.copy_(tensor)


@pytest.mark.parametrize(("method", "kernel"), [("plain", 3), ("winograd", 3), ("winograd", 5)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (3, 5), (5, 9), (8, 8), (13, 27)])
def test_nothing_is_read_or_written_outside_the_tensors(channels, outputs, padding, method, kernel):
    at_the_end = AtTheEnd()
    prefix = convolve._PREFIXES[method]
    layer = nn.Conv2d(channels, outputs, kernel, padding=padding)
    x, y = torch.randn(3, channels, 7, 7), layer(torch.zeros(3, channels, 7, 7)).detach()
    dy = torch.randn_like(y)
    weight, bias = at_the_end(layer.weight.detach()), at_the_end(layer.bias.detach())
    xs, dys = at_the_end(x), at_the_end(dy)
    expected = passes_of_torch(layer, x, dy)
    shape = convolve._shape_of(layer, x.shape)
    got = []
    for name, inputs, results in (
        (f"{prefix}_forward", (xs, weight, bias), [y]),
        (f"{prefix}_input_gradient", (dys, weight), [x]),
        (f"{prefix}_weight_gradient", (xs, dys), [layer.weight.detach(), layer.bias.detach()]),
    ):
        room = [torch.full((tensor.numel() + GUARD,), 7.0) for tensor in results]  # before a result: untouched as well
        ends = [at_the_end(torch.zeros_like(tensor)) for tensor in results]
        call(name, shape, *inputs, *ends)
        call(name, shape, *inputs, *(each[GUARD:] for each in room))
        assert all((each[:GUARD] == 7.0).all() for each in room)
        got += ends
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=PRECISION[method], atol=10 * PRECISION[method])


WITHOUT_MEMORY = """
import resource
import torch
from torch import nn
from syncline.compute.kernels import convolve
from syncline.compute.kernels.build import call, library

library()
layer = nn.Conv2d(512, 512, 3, padding=1).requires_grad_(False)
x = torch.zeros(64, 512, 8, 8).contiguous(memory_format=torch.channels_last)
dy, dweight, dbias = x.clone(), torch.ones(512, 3, 3, 512), torch.ones(512)
for prefix in convolve._PREFIXES.values():
    arguments = f"{prefix}_weight_gradient", convolve._shape_of(layer, x.shape), x, dy, dweight, dbias
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, -1))
    try:
        call(*arguments)
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    call(*arguments)
    assert not dweight.any(), "it works when there is memory again"
    dweight.fill_(1)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as on Linux")
def test_too_little_memory_is_an_error_and_not_the_end_of_the_process():
    without_reserves = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=120, env=without_reserves
    )
    assert done.returncode == 0, done.stderr
    assert [line.count("--tune off") for line in done.stdout.splitlines()] == [1, 1]
