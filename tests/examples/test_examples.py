"""The examples and the demo do what they say. What pages show is run in `tests/docs`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from warm_process import warm_process

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def python(*arguments: str, cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment, command = {**os.environ, "PYTHONPATH": path}, warm_process().words(*arguments)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def syncline(*arguments: str, cwd: Path) -> str:
    return python("-m", "syncline.cli.main", *arguments, cwd=cwd)


def test_the_task_example_learns_its_spirals(tmp_path):
    out = syncline(
        "train", str(EXAMPLES / "my_task.py:task"), "--workers", "2", "--epochs", "5", "--json", cwd=tmp_path
    )
    assert json.loads(out.splitlines()[-1])["metrics"]["test/accuracy"] > 0.9


def test_the_run_file_example_reaches_97_percent_on_held_out_digits(tmp_path):
    out = syncline("train", str(EXAMPLES / "my_run.toml"), "--json", cwd=tmp_path)
    assert json.loads(out.splitlines()[-1])["metrics"]["test/accuracy"] > 0.97


def test_the_own_loop_example_gives_the_same_numbers_alone_and_with_workers(tmp_path):
    alone = python(str(EXAMPLES / "my_loop.py"), cwd=tmp_path)
    together = syncline("run", str(EXAMPLES / "my_loop.py"), "--workers", "3", cwd=tmp_path)
    said = re.search(r"accuracy 0\.\d+, checksum \d+\.\d\d\d", alone)
    assert said is not None
    assert said[0] in together


def test_the_python_example_prints_what_it_learned(tmp_path):
    out = python(str(EXAMPLES / "from_python.py"), cwd=tmp_path)
    found = re.search(r"R2 on new data: (0\.\d+)", out)
    assert found is not None
    assert float(found[1]) > 0.9


def test_the_demo_of_the_readme_reaches_97_percent_and_says_what_to_type_next(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(r"^demo:.*\n\t\$\(BIN\)/syncline (.*)$", makefile, re.M)
    assert found is not None
    out = syncline(*shlex.split(found[1]), cwd=tmp_path)
    accuracy = re.findall(r"test/accuracy (\d\d\.\d+)%", out)
    assert float(accuracy[-1]) >= 97
    assert "┤" in out, "the curve"
    following = re.search(r"next: syncline (resume \S+ --epochs \d+)", out)
    assert following is not None
    assert "epoch 40/40" in syncline(*following[1].split(), cwd=tmp_path), "what it says to type next works"


def test_the_strategy_example_is_what_the_page_shows_in_under_60_lines_and_trains(tmp_path):
    source = (EXAMPLES / "my_strategy.py").read_text()
    page = (ROOT / "docs" / "adding-a-strategy.md").read_text()
    assert f"```python\n{source}```" in page
    assert len(source.splitlines()) < 60
    command = re.findall(r"```sh\nsyncline (train .*)\n```", page)[0]
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    out = syncline(*shlex.split(command), "--epochs", "12", "--json", cwd=tmp_path)
    last = json.loads(out.splitlines()[-1])
    assert last["metrics"]["test/accuracy"] > 0.8
    told = syncline("strategies", "--run", last["run_dir"], "--json", cwd=tmp_path)
    assert "exchanges" in told


def test_the_strategy_example_passes_the_contract_as_the_page_says(tmp_path):
    page = (ROOT / "docs" / "adding-a-strategy.md").read_text()
    check = re.findall(r"```python\n(.*?)```", page, re.S)[-1]
    assert "check_strategy" in check
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    (tmp_path / "check.py").write_text(check)
    python("check.py", cwd=tmp_path)


@pytest.mark.xdist_group("spark")
def test_the_spark_example_predicts_in_a_pipeline_what_it_has_saved(tmp_path):
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    out = python(str(EXAMPLES / "spark_pipeline.py"), cwd=tmp_path)
    found = re.search(r"accuracy on new digits: (0\.\d+)", out)
    assert found is not None, out
    assert float(found[1]) > 0.9
