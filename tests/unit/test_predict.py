"""Asking a trained model about images: the weights that come along, and a run's own."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image, ImageDraw, ImageFont
from serving_models import save_model
from typer.testing import CliRunner

import syncline
from syncline.cli.main import app
from syncline.data.image_input import find_images, read_image
from syncline.data.named import named
from syncline.errors import CheckpointError, ConfigError, DataError, UnknownName
from syncline.models.zoo import pretrained
from syncline.serving.metadata import ModelMetadata, TensorFacts

MNIST = (1, 28, 28)


def drawn(digit: str, *, size: int = 120, ink: object = "black", paper: object = "white", mode: str = "RGB"):
    """A digit as one would draw it in a paint program."""
    image = Image.new(mode, (size, size), paper)
    font = ImageFont.load_default(size=size * 0.7)
    ImageDraw.Draw(image).text((size / 2, size / 2), digit, fill=ink, font=font, anchor="mm")
    return image


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["predict", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


class TestTheWeightsThatComeAlong:
    def test_belong_to_a_run_file_and_say_what_they_reach(self) -> None:
        weights = pretrained.find("lenet")
        run = tomllib.loads(weights.path.with_suffix(".toml").read_text())
        assert (run["model"], run["data"]) == (weights.name, weights.info.name) == ("lenet", "mnist")
        assert weights.metrics["accuracy"] > 0.99
        assert weights.path.stat().st_size < 1_000_000

    def test_recognize_drawn_digits_at_once(self, tmp_path: Path) -> None:
        for digit in "0123456789":
            drawn(digit).save(tmp_path / f"{digit}.png")
        found = syncline.predict("lenet", tmp_path)
        assert sum(one.label == one.image.stem for one in found) >= 8  # a printer's digits, not a hand's

    def test_recognize_digits_that_people_wrote_for_another_data_set(self, tmp_path: Path) -> None:
        data = named("digits")
        inputs, targets = data.load(data.locate(None, None), "test")
        for number in range(50):
            scan = Image.fromarray(255 - (255 * inputs[number, 0]).astype(np.uint8)).resize((96, 96), Image.BICUBIC)
            page = Image.new("L", (160, 130), 255)
            page.paste(scan, (40, 20))
            page.save(tmp_path / f"{number:02}.png")
        right = [one.label == str(targets[n]) for n, one in enumerate(syncline.predict("lenet", tmp_path))]
        assert sum(right) >= 40

    @pytest.mark.parametrize(
        ("ink", "paper", "mode"),
        [("black", "white", "RGB"), ("white", "black", "L"), ((90, 30, 160), (250, 240, 200), "RGB"),
         ("black", (0, 0, 0, 0), "RGBA"), (0, 1, "1")],
    )  # fmt: skip
    def test_read_any_colors_of_ink_and_paper(self, ink, paper, mode, tmp_path: Path) -> None:
        drawn("3", ink=ink, paper=paper, mode=mode).save(tmp_path / "three.png")
        assert syncline.predict("lenet", tmp_path / "three.png")[0].label == "3"

    def test_give_probabilities_of_all_classes(self, tmp_path: Path) -> None:
        drawn("3").save(tmp_path / "three.png")
        found = syncline.predict("lenet", [tmp_path / "three.png"])[0]
        assert list(found.probabilities) == list("0123456789")
        assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-4)
        assert found.probability == max(found.probabilities.values()) > 0.5

    def test_are_refused_when_they_are_corrupt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for path in pretrained.FOLDER.glob("lenet-mnist.*"):
            shutil.copy(path, tmp_path)
        (tmp_path / "lenet-mnist.npz").write_bytes(b"nonsense")
        monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
        with pytest.raises(CheckpointError, match=r"lenet-mnist.npz is corrupt"):
            pretrained.find("lenet-mnist").model()

    def test_come_back_as_they_were_saved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        weights = pretrained.find("lenet")
        pretrained.save(tmp_path / "mine.npz", "lenet", {}, weights.info, weights.model(), {"accuracy": 0.5})
        monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
        again = pretrained.find("mine")
        assert (again.info, again.metrics) == (weights.info, {"accuracy": 0.5})
        state, before = again.model().state_dict(), weights.model().state_dict()
        assert all(torch.equal(state[key], before[key]) for key in before)


class TestTheCommand:
    def test_prints_a_line_for_each_image(self, tmp_path: Path) -> None:
        drawn("3").save(tmp_path / "three.png")
        drawn("7").save(tmp_path / "seven.jpg")
        lines = told("lenet", str(tmp_path)).splitlines()
        assert [line.split()[0] for line in lines] == [str(tmp_path / "seven.jpg"), str(tmp_path / "three.png")]
        assert lines[1].split()[1] == "3"
        assert lines[1].endswith("%")

    def test_prints_json_for_programs(self, tmp_path: Path) -> None:
        drawn("3").save(tmp_path / "three.png")
        found = json.loads(told("lenet", str(tmp_path / "three.png"), "--json"))
        assert found["class"] == "3"
        assert found["probabilities"]["3"] == found["probability"]

    def test_takes_a_run_directory_and_its_newest_checkpoint(self, tmp_path: Path) -> None:
        result = syncline.train(
            model="mlp(hidden=(32,))", data="digits", workers=1, epochs=8, out=str(tmp_path), name="r", quiet=True
        )
        for digit in "01":
            drawn(digit).save(tmp_path / f"{digit}.png")
        found = syncline.predict(result.run_dir, [tmp_path / "0.png", tmp_path / "1.png"])
        assert [list(one.probabilities) for one in found] == [list("0123456789")] * 2
        assert found[0].label == "0"


class TestPictures:
    def test_of_the_right_size_are_left_as_they_are(self, tmp_path: Path) -> None:
        pixels = np.zeros((28, 28), np.uint8)
        pixels[3:9, 20:25] = 200
        Image.fromarray(pixels).save(tmp_path / "small.png")
        read = read_image(tmp_path / "small.png", MNIST, is_handwriting=True)
        assert np.array_equal(read, pixels[None].astype(np.float32) / 255)

    @pytest.mark.parametrize("size", [(300, 200), (64, 64), (9, 30)])
    def test_of_other_sizes_get_their_ink_centred_as_in_mnist(self, size: tuple[int, int], tmp_path: Path) -> None:
        width, height = size
        pixels = np.full((height, width), 250, np.uint8)
        pixels[1 : height // 2, 1 : width // 2] = 10
        Image.fromarray(pixels).save(tmp_path / "corner.png")
        read = read_image(tmp_path / "corner.png", MNIST, is_handwriting=True)[0]
        rows, columns = np.nonzero(read > 0.5)
        assert max(np.ptp(rows), np.ptp(columns)) + 1 == pytest.approx(20, abs=1)
        assert rows.mean() == pytest.approx(13.5, abs=1)
        assert columns.mean() == pytest.approx(13.5, abs=1)

    def test_without_ink_are_read_as_empty(self, tmp_path: Path) -> None:
        Image.new("RGB", (50, 40), "white").save(tmp_path / "empty.png")
        assert not read_image(tmp_path / "empty.png", MNIST, is_handwriting=True).any()

    def test_in_color_keep_their_channels(self, tmp_path: Path) -> None:
        Image.new("RGB", (64, 48), (255, 0, 51)).save(tmp_path / "red.png")
        read = read_image(tmp_path / "red.png", (3, 32, 32), is_handwriting=False)
        assert read.shape == (3, 32, 32)
        assert read[:, 5, 5] == pytest.approx([1.0, 0.0, 0.2], abs=1e-6)

    def test_are_reported_by_name_when_they_are_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no image .*nowhere\.png"):
            find_images([tmp_path / "nowhere.png"])

    def test_a_folder_without_images_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("7")
        with pytest.raises(DataError, match="no images"):
            find_images([tmp_path])

    @pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + bytes(20)])
    def test_that_are_none_are_reported_by_name(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.png"):
            read_image(tmp_path / "bad.png", MNIST, is_handwriting=True)

    def test_that_are_cut_off_are_reported_by_name(self, tmp_path: Path) -> None:
        drawn("3").save(tmp_path / "whole.png")
        data = (tmp_path / "whole.png").read_bytes()
        (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
        with pytest.raises(DataError, match=r"cut\.png"):
            read_image(tmp_path / "cut.png", MNIST, is_handwriting=True)


def test_a_model_without_weights_is_answered_with_what_to_do(tmp_path: Path) -> None:
    drawn("3").save(tmp_path / "three.png")
    with pytest.raises(UnknownName, match=r"'resnet18'.*lenet.*run directory"):
        syncline.predict("resnet18", tmp_path / "three.png")


def test_a_run_on_data_without_a_name_is_reported_why_it_cannot_be_asked(tmp_path: Path) -> None:
    inputs, targets = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    result = syncline.train(
        model="linear", data=(inputs, targets), workers=1, epochs=1, out=str(tmp_path), name="r", quiet=True
    )
    drawn("3").save(tmp_path / "three.png")
    with pytest.raises(ConfigError) as refused:
        syncline.predict(result.run_dir, tmp_path / "three.png")
    assert (refused.value.code, refused.value.facts["shape"]) == ("not-images", (4,))


def test_a_run_on_what_are_no_images_is_reported_why_it_cannot_be_asked(tmp_path: Path) -> None:
    result = syncline.train(model="linear", data="iris", workers=1, epochs=1, out=str(tmp_path), name="r", quiet=True)
    drawn("3").save(tmp_path / "three.png")
    with pytest.raises(ConfigError, match=r"trained on iris.*\(4,\).*not\s+images"):
        syncline.predict(result.run_dir, tmp_path / "three.png")


def test_every_layer_that_show_lists_is_an_output_of_predict(tmp_path: Path) -> None:
    drawn("7").save(tmp_path / "seven.png")
    shown = CliRunner().invoke(app, ["show", "lenet", "--data", "mnist"])
    names = shown.output.rpartition("Layers by name: ")[2].split("\n")[0].split(", ")
    assert len(names) == 8
    found = json.loads(told("lenet", str(tmp_path / "seven.png"), "--output", ",".join([*names, "logits"]), "--json"))
    assert list(found["outputs"]) == [*names, "logits"]
    logits = np.array(found["outputs"]["logits"])
    assert np.array_equal(logits, found["outputs"][names[-1]])
    softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert np.allclose(softmax, list(found["probabilities"].values()), atol=1e-6)


def test_an_exported_file_with_logits_only_gives_probabilities(tmp_path: Path) -> None:
    """As `syncline export --outputs logits` writes it: the sum of the upper and of the lower half of 2 x 2 pixels."""
    facts = ModelMetadata(
        name="m", version="1", sha256="ab", kind="image", answers="classes", class_names=("upper", "lower"),
        inputs=(TensorFacts(name="x", dtype="float32", shape=(1, 2, 2)),),
        outputs=(TensorFacts(name="logits", dtype="float32", shape=(2,)),),
    )  # fmt: skip
    path = save_model(
        tmp_path / "m.onnx",
        [helper.make_node("ReduceSum", ["x", "axes"], ["logits"], keepdims=0)],
        {"x": (TensorProto.FLOAT, ["batch", 1, 2, 2])},
        {"logits": (TensorProto.FLOAT, ["batch", 2])},
        {"axes": np.array([1, 3])},
    )
    model = onnx.load(path)
    model.metadata_props.add(key="syncline", value=facts.to_json())
    onnx.save(model, path)
    image = Image.new("L", (2, 2), 0)
    image.putpixel((0, 1), 255)
    image.save(tmp_path / "lower.png")
    (found,) = syncline.predict(path, tmp_path / "lower.png", outputs=["logits"])
    assert found.label == "lower"
    assert found.outputs["logits"].tolist() == [0.0, 1.0]
    assert found.probability == pytest.approx(1 / (1 + np.exp(-1)))
    with pytest.raises(UnknownName):
        syncline.predict(path, tmp_path / "lower.png", outputs=["fc1"])
