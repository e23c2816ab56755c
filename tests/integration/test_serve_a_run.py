"""A run and a shipped model behind one server: new checkpoints are followed, and people try the models in a browser."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from browser import SEEN, Watched, a_browser, needs_browser, serious_findings
from PIL import Image, ImageDraw
from real_runs import samples, small_net

import syncline
from syncline.checkpoint import store
from syncline.telemetry.run_dir import RunDir

pytestmark = pytest.mark.xdist_group("serve-a-run")

WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder):
    inputs, targets = samples()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        syncline.train(
            model=small_net(),
            data=(inputs, targets),
            test=(inputs, targets),
            workers=1,
            epochs=1,
            name="run",
            quiet=True,
        )
    with syncline.serve(folder / "runs" / "run", "lenet", follow=True) as made:
        yield made


def step_of(server) -> int:
    return server.metadata("run")["parameters"]["step"]


def until_step(server, step: int) -> float:
    """The seconds until this checkpoint answers."""
    start = time.monotonic()
    while step_of(server) != step:
        assert time.monotonic() - start < WAIT_S
        threading.Event().wait(0.01)
    return time.monotonic() - start


def test_new_checkpoints_are_served_and_half_written_ones_never(server, folder):
    checkpoints = RunDir(folder / "runs" / "run").checkpoints
    newest, state, _ = store.newest_sound(checkpoints)
    assert step_of(server) == newest.step
    x = np.zeros((1, 12), np.float32)
    for k in (1, 2):
        # The last bias alone decides here: class k wins.
        for name, tensor in state["model"].items():
            tensor.zero_()
            if name.endswith("2.bias"):
                tensor[k] = 10.0
        saved = store.save(checkpoints, newest.step + k, state, keep=9)
        assert until_step(server, saved.step) < 10  # 0.2 s on an idle machine
        assert server.predict(x, model="run").argmax() == k
    half = checkpoints / f"step-{saved.step + 1:08d}.pt"
    half.write_bytes(saved.path.read_bytes()[:-100])
    manifest = json.loads(saved.path.with_suffix(".json").read_text()) | {"step": saved.step + 1}
    half.with_suffix(".json").write_text(json.dumps(manifest))
    for name, tensor in state["model"].items():
        if name.endswith("2.bias"):
            tensor.copy_(tensor.roll(1))
    store.save(checkpoints, saved.step + 2, state, keep=9)
    until_step(server, saved.step + 2)
    index = server._ask("POST", "/v2/repository/index", b"{}")
    assert sum(one["name"] == "run" for one in index) == 4  # the first, two new ones and the last


def digit() -> bytes:
    """A seven, dark on white."""
    picture = Image.new("L", (200, 260), "white")
    ImageDraw.Draw(picture).line([(50, 50), (150, 50), (90, 220)], fill="black", width=18)
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def test_a_picture_is_an_input_of_a_model_of_images(server):
    asked = server._connection
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "image/png"}
    asked.request("POST", "/v2/models/lenet/predict", digit(), headers)
    response = asked.getresponse()
    answer = json.loads(response.read())
    assert (response.status, answer["predictions"][0]["class"]) == (200, "7")
    for body in (b"no picture", digit()[:100]):
        asked.request("POST", "/v2/models/lenet/predict", body, headers)
        response = asked.getresponse()
        assert (response.status, "error" in json.loads(response.read())) == (400, True)


def test_rows_of_numbers_are_an_input_of_a_table(server):
    answer = server._ask("POST", "/v2/models/run/predict", json.dumps({"rows": [[0.0] * 12] * 2}).encode())
    assert len(answer["predictions"]) == 2
    assert answer["model_name"] == "run"


@needs_browser
def test_people_draw_a_digit_upload_a_picture_and_type_numbers(server, tmp_path):
    (tmp_path / "seven.png").write_bytes(digit())
    with a_browser() as browser:
        seen = Watched(browser)
        page = seen.page
        page.goto(server.page)
        form = page.locator('form[data-model="lenet"]')
        box = form.locator("canvas").bounding_box()
        corners = [(0.25, 0.2), (0.75, 0.2), (0.45, 0.85)]
        points = [(box["x"] + a * box["width"], box["y"] + b * box["height"]) for a, b in corners]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point, steps=8)
        page.mouse.up()
        form.locator(".answer").wait_for()
        assert form.locator(".answer").inner_text() == "7"
        assert form.locator("tbody tr").count() == 5
        form.get_by_role("button", name="Clear").click()
        assert form.locator(".answer").count() == 0
        form.locator("input[type=file]").set_input_files(Path(tmp_path / "seven.png"))
        form.locator(".answer").wait_for()
        assert form.locator(".answer").inner_text() == "7"
        table = page.locator('form[data-model="run"]')
        table.get_by_role("textbox").fill("1, 2, 3")
        table.get_by_role("button", name="Predict").click()
        table.locator(".wrong").wait_for()
        table.get_by_role("textbox").fill(" ".join(["0"] * 12))
        table.get_by_role("button", name="Predict").click()
        table.locator(".answer").wait_for()
        assert serious_findings(page) == []
        page.set_viewport_size(SEEN["narrow"])
        assert not seen.is_wider_than_the_screen()
        assert {url.split("/")[2] for url in seen.requests} == {f"127.0.0.1:{server.port}"}
        assert [text for text in seen.complaints if "400" not in text] == []
