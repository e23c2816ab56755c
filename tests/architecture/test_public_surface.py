"""What is promised, and how fast it loads."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import syncline


def test_every_public_name_can_be_loaded_and_nothing_else_is_offered():
    for name in syncline.__all__:
        assert getattr(syncline, name) is not None
    assert set(dir(syncline)) == {*syncline.__all__, "__version__"}


def test_public_names_are_typed_the_way_they_are_loaded():
    source = inspect.getsource(syncline)
    typed = source.partition("if TYPE_CHECKING:")[2].partition("__version__")[0]
    for name in syncline.__all__:
        assert name in typed, f"{name} is missing from the imports that type checkers see"


def test_every_module_says_what_lives_there_and_what_it_exports():
    for module in pkgutil.walk_packages(syncline.__path__, "syncline."):
        if ".bench.scripts" in module.name:
            continue
        loaded = importlib.import_module(module.name)
        assert loaded.__doc__, f"{module.name} has no docstring"
        if not module.ispkg:
            for name in getattr(loaded, "__all__"):  # noqa: B009  # a missing one is the failure
                assert hasattr(loaded, name), f"{module.name}.__all__ names {name}, which is not there"


def test_importing_syncline_and_reading_the_command_line_loads_no_torch():
    code = (
        "import sys, syncline, syncline.cli.main, syncline.driver, syncline.cli.tasks\n"
        "heavy = {'torch', 'pyspark', 'ray', 'sklearn', 'numpy', 'torchmetrics'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_worker_loop_fits_on_one_screen():
    from syncline.workers import loop

    assert len(inspect.getsource(loop.train).splitlines()) <= 40
    for moment in ("data", "before_forward", "forward_and_backward", "update", "after_epoch", "save"):
        assert moment in inspect.getsource(loop.train)


def test_a_worker_trains_without_loading_torchs_compiler_or_torchmetrics():
    code = """
import sys, torch
from syncline.workers.quick_start import without_compiler
without_compiler()
p = torch.nn.Parameter(torch.ones(3))
for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
    o = make([p], lr=0.1)
    p.grad = torch.ones(3)
    o.step(); o.zero_grad(); o.load_state_dict(o.state_dict())
assert 'torch._dynamo' not in sys.modules
import torch._dynamo
p.grad = torch.ones(3); before = p.detach().clone(); o.step()
assert not torch.equal(before, p), 'optimisers go on working once the compiler is there'
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
