"""What is promised, and how fast it loads."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import syncline


def test_every_public_name_can_be_loaded_and_nothing_else_is_offered():
    for name in syncline.__all__:
        assert getattr(syncline, name) is not None
    assert set(dir(syncline)) == {*syncline.__all__, "__version__"}


def test_every_module_has_a_docstring_and_exports_only_what_it_has():
    # In a process of its own: tests import other stubs of the protocol that the server speaks, and one process cannot
    # have both.
    code = """
import importlib, pkgutil, syncline
for module in pkgutil.walk_packages(syncline.__path__, "syncline."):
    if ".bench.scripts" in module.name or module.name.endswith("__main__"):
        continue
    loaded = importlib.import_module(module.name)
    assert loaded.__doc__, f"{module.name} has no docstring"
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), f"{module.name}.__all__ names {name}, which is not there"
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_that_define_public_names_declare_what_they_export():
    for name, home in syncline._HOME.items():
        assert name in importlib.import_module(home).__all__, f"{home}.__all__ lacks {name}"


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

    source = inspect.getsource(loop.train)
    assert len(source.splitlines()) <= 40
    for moment in ("begin_step", "forward_and_backward", "update", "after_epoch", "end_step"):
        assert moment in source


def test_the_order_of_a_step_exists_once_and_both_loops_use_it():
    import syncline.workers
    from syncline.workers import loop, stepper
    from syncline.workers.own_loop import training, updates

    folder = Path(syncline.workers.__file__).parent
    for call in (
        ".check_membership(",
        ".at_step(",
        ".seed_step(",
        ".before_forward(",
        ".advance(",
        "checkpoints.save(",
    ):
        passes_on = {"exchange_group.py"}  # the calls of the stepper, to each optimizer's exchange
        users = [f.name for f in folder.rglob("*.py") if call in f.read_text() and f.name not in passes_on]
        assert users == ["stepper.py"], f"{call} belongs to the order of a step"
    for moment in ("begin_step", "combine", "complete", "end_step"):
        assert hasattr(stepper.Stepper, moment)
        assert f"stepper.{moment}(" in inspect.getsource(training) + inspect.getsource(updates)
    for moment in ("begin_step", "update", "end_step"):
        assert hasattr(stepper.Stepper, moment)
        assert f"stepper.{moment}(" in inspect.getsource(loop)


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
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
replica(torch.ones(1, 2)).sum().backward()
assert 'torch._dynamo' not in sys.modules
import torch._dynamo
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer", 'what DDP was told instead'
assert torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)
p.grad = torch.ones(3); before = p.detach().clone(); o.step()
assert not torch.equal(before, p), 'optimizers go on working once the compiler is there'
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
