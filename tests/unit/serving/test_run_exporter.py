"""Files for the server, made of runs: new weights in an old graph, and torch where ONNX cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from syncline.errors import ExportError
from syncline.serving.exporting.graph import default_outputs
from syncline.serving.exporting.onnx_file import runner
from syncline.serving.samples import Preparation
from syncline.serving.server import reweigh
from syncline.serving.server.engine import load_engine
from syncline.serving.server.reweigh import RunExporter
from syncline.serving.server.tuning import tune
from syncline.serving.trained import TrainedModel


def trained(seed: int, step: int) -> TrainedModel:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    net[1].running_mean.normal_()
    return TrainedModel(
        module=net, name="net", version=str(step), preparation=Preparation(None, ()), answers="classes", shape=(6,),
        facts={"step": step},
    )  # fmt: skip


def outputs_of(model: TrainedModel, x: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model.module(torch.from_numpy(x.copy())).numpy()


def test_new_weights_give_the_outputs_of_the_new_model_without_tracing_it_again(tmp_path, monkeypatch):
    models, traced = [trained(0, 10), trained(1, 20), trained(2, 30)], []
    export_onnx = reweigh.export_onnx
    monkeypatch.setattr(reweigh, "export_onnx", lambda *a, **o: traced.append(1) or export_onnx(*a, **o))
    exporter, x = RunExporter("net"), np.random.default_rng(0).standard_normal((4, 6), np.float32)
    for k, model in enumerate(models):
        monkeypatch.setattr(reweigh, "trained_model", lambda _, model=model: model)
        (tmp_path / str(k)).mkdir()
        path = exporter.export(tmp_path / str(k))
        found = runner(path, default_outputs(model))((x,))
        assert np.allclose(found["logits"], outputs_of(model, x), atol=1e-5)
        assert exporter.last_step == model.facts["step"]
    assert len(traced) == 1  # tracing takes seconds


def test_a_model_without_an_onnx_form_is_served_with_torch_and_says_so(tmp_path, monkeypatch):
    model = trained(0, 10)

    def refuse(*_: object, **__: object) -> None:
        raise ExportError("no such operator", code="export-operator")

    monkeypatch.setattr(reweigh, "trained_model", lambda _: model)
    monkeypatch.setattr(reweigh, "export_onnx", refuse)
    exporter = RunExporter("net")
    path = exporter.export(tmp_path)
    assert "no such operator" in exporter.note
    tuned = tune(lambda threads: load_engine(path, threads), 1, 4)
    x = np.random.default_rng(0).standard_normal((4, 6), np.float32)
    x.flags.writeable = False  # as the memory of a request is
    names = tuned.engine.signature.output_names
    found = dict(zip(names, tuned.engine.run({"input": x}), strict=True))
    assert np.allclose(found["logits"], outputs_of(model, x), atol=1e-5)
    assert (tuned.engine.platform, tuned.max_batch) == ("pytorch_export", 4)


def test_if_neither_works_the_reason_is_the_first_one(tmp_path, monkeypatch):
    def refuse(code: str):
        def raising(*_: object, **__: object) -> None:
            raise ExportError(code, code=code)

        return raising

    monkeypatch.setattr(reweigh, "trained_model", lambda _: trained(0, 10))
    monkeypatch.setattr(reweigh, "export_onnx", refuse("export-operator"))
    monkeypatch.setattr(reweigh, "save_program", refuse("export-failed"))
    with pytest.raises(ExportError) as raised:
        RunExporter("net").export(tmp_path)
    assert raised.value.code == "export-operator"
