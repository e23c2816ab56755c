"""The doctor names what would go wrong, with the fix, and finds nothing where nothing would."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from syncline.cli import doctor
from syncline.cli.doctor import Check, examine
from syncline.cli.main import app


def found(what: str, out: Path) -> Check:
    return next(f for f in examine(out) if f.what == what)


def test_everything_is_looked_at_once_and_said_in_one_line(tmp_path):
    findings = list(examine(tmp_path / "not" / "made" / "yet"))
    names = [f.what for f in findings]
    assert len(names) == len(set(names))
    assert {"system", "cores", "memory", "shared memory between workers", "torch", "network", "ray"} <= set(names)
    assert all(f.found and "\n" not in f.found + f.problem for f in findings)
    assert found("run directories", tmp_path / "runs").found.startswith(str(tmp_path))


def test_a_cpu_build_of_torch_beside_a_gpu_is_named(tmp_path, monkeypatch):
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else real(name))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = found("torch", tmp_path).problem
    assert "GPU" in problem
    assert "https://pytorch.org/get-started" in problem
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in found("torch", tmp_path).problem


def test_a_missing_compiler_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "syncline.compute.kernels.build.why_unavailable", lambda: "there is no C++ compiler (g++ or clang++)"
    )
    problem = found("compiled convolutions", tmp_path).problem
    assert "there is no C++ compiler" in problem
    assert "apt install g++" in problem


def test_no_java_for_spark_is_named_with_what_to_install(tmp_path, monkeypatch):
    pytest.importorskip("pyspark")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("syncline.engines.java.borrowed_java_home", lambda: None)
    assert "apt install openjdk-17-jre-headless" in found("pyspark", tmp_path).problem


def test_little_memory_a_full_disk_and_one_core_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("syncline.comms.segment.memory_available", lambda: int(1e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert "--workers" in found("memory", tmp_path).problem
    assert "--out" in found("run directories", tmp_path).problem
    assert "more workers" in found("cores", tmp_path).problem


def test_few_descriptors_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "ulimit -n 65536" in found("open files", tmp_path).problem


def test_a_missing_optional_package_is_no_problem():
    missing = doctor._optional("no-such-package", "--engine x; pip install x")
    assert missing == Check("no-such-package", "not installed (for: --engine x; pip install x)")


def test_the_exit_code_is_1_if_there_is_a_problem(tmp_path, monkeypatch):
    findings = [Check("cores", "2")]
    monkeypatch.setattr(doctor, "examine", lambda out: iter(findings))
    good = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path)])
    assert (good.exit_code, good.output) == (0, "ok  cores: 2\nno problems\n")
    findings.append(Check("memory", "1 GB", "Buy some."))
    bad = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path)])
    assert (bad.exit_code, bad.output) == (1, "ok  cores: 2\n!!  memory: 1 GB\n    Buy some.\n1 problem\n")
