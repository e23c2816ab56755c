"""A user's own loop is tuned in one of its first steps, and computes the same up to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import script_runs
from own_loop_scripts import HEAD
from real_runs import Ran, final_state, relative_difference, same_bits

from syncline.compute.tuning import TuningResult
from syncline.telemetry.events import InfoMessage
from syncline.telemetry.run_dir import RunDir

IMAGES = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3)
        self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.1)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.conv2(F.max_pool2d(self.drop(self.norm(self.conv1(x)).relu()), 2))

images = torch.randn(600, 3, 8, 8)
loader = DataLoader(TensorDataset(images, torch.arange(600) % 3), batch_size=6, shuffle=True)
model, head = Net(), nn.Linear(48, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.02)
model, head, optimizer, batches = worker.prepare(model, head, optimizer, loader)
steps = 0
for x, y in batches:
    optimizer.zero_grad()
    features = model(x)
    F.cross_entropy(head(features.view(len(x), -1)), y).backward()  # view refuses channels-last memory
    assert model.conv1.weight.grad.view(-1) is not None and model.conv1.weight.is_contiguous()
    optimizer.step()
    steps += 1
    if worker.step == 30:
        worker.state.kind = type(model.conv1).__name__
        worker.state.calls = model.calls - steps
"""
)
COMPILED = dict.fromkeys(("forward", "input", "weight"), "compiled")
LAYERS = {"model.conv1": COMPILED, "model.conv2": dict.fromkeys(COMPILED, "winograd")}


def run(folder: Path, name: str, *arguments: str, script: str = IMAGES, **options: Any) -> Ran:
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    return script_runs.run(folder, script, name, *arguments, workers=2, env=cache, **options)


def tuning_of(folder: Path, name: str) -> list[dict[str, Any]]:
    messages = [e for e in RunDir(folder / "runs" / name).read_events() if isinstance(e, InfoMessage)]
    return [e.details["tuning"] for e in messages if "tuning" in e.details]


def overwrite_cache(folder: Path, **changes: object) -> None:
    """Which tuning is fastest is for the clock to say, so a test overwrites its answer."""
    cache = folder / "cache" / "syncline" / "tuning.json"
    found = json.loads(cache.read_text())
    assert found
    for tuning, results in found.values():
        tuning.update(changes)
        results[:] = [vars(TuningResult(choice="convolutions", usual="a", other="b", speed=2.0, is_taken=True))]
    cache.write_text(json.dumps(found))


def test_tuned_scripts_compute_the_same_and_killed_ones_the_same_bits(tmp_path):
    run(tmp_path, "measured")
    assert len(tuning_of(tmp_path, "measured")) == 1
    run(tmp_path, "plain", "--tune", "off")
    assert not tuning_of(tmp_path, "plain")
    measured, plain = (final_state(tmp_path / "runs" / name) for name in ("measured", "plain"))
    assert relative_difference(measured["model"], plain["model"]) < 1e-3
    assert measured["script"]["values"]["calls"] == 0, "no forward pass but the script's own"
    overwrite_cache(tmp_path, memory_format="channels-last", layers=LAYERS)
    run(tmp_path, "tuned")
    assert [tuning["layers"] for tuning in tuning_of(tmp_path, "tuned")] == [LAYERS]
    # Before the tuning is known, in the step in which it is applied, and when it is known.
    faults = "kill worker 1 at step 4; kill worker 0 at step 8; kill worker 1 at step 40"
    done = run(tmp_path, "killed", "--on-worker-failure", "replace-only", faults=faults)
    assert done.out.count("was killed by SIGKILL") == 3
    tuned, killed = (final_state(tmp_path / "runs" / name) for name in ("tuned", "killed"))
    assert tuned["script"]["values"]["kind"] != "Conv2d"
    assert relative_difference(tuned["model"], plain["model"]) < 1e-3
    assert same_bits(tuned["model"], killed["model"])


def test_what_the_cache_says_is_tried_on_the_script_as_it_is_now(tmp_path):
    inside = "return 0 * self.conv1(x).view(len(x), -1).sum() + self.conv2("
    script = IMAGES.replace("return self.conv2(", inside)
    run(tmp_path, "measured", script=script)
    overwrite_cache(tmp_path, memory_format="channels-last", layers={})
    run(tmp_path, "again", script=script)
    assert [tuning["memory_format"] for tuning in tuning_of(tmp_path, "again")] == ["contiguous"]
