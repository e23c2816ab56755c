from __future__ import annotations

from pathlib import Path

import pytest

from syncline.config.toml import read_run_file
from syncline.errors import ConfigError, ConfigFileError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_run_file_gives_task_and_settings(tmp_path):
    file = read_run_file(
        write(tmp_path, 'model = "lenet"\ndata = "mnist"\nworkers = 4\n[optimizer]\nname = "sgd"\nlr = 1\n')
    )
    assert file.task == {"model": "lenet", "data": "mnist", "optimizer": {"name": "sgd", "lr": 1}}
    assert file.config == {"workers": 4}


@pytest.mark.parametrize(
    ("text", "line", "facts"),
    [
        ('model = "a"\ndata = "b"\nwokers = 2\n', 3, ("'wokers'", "'workers'")),
        ('model = "a"\ndata = "b"\nworkers = "two"\n', 3, ("workers", "'two'", "integer")),
        (
            '# x\nmodel = "a"\ndata = "b"\n\ndevice = "gpu"\n',
            5,
            ("device", "'gpu'", "'auto' or 'cpu' or 'cuda'"),
        ),
        ('model = "a"\ndata = "b"\nseed = true\n', 3, ("seed", "True", "integer")),
        ('model = "a"\ndata = "b"\n[optimizer]\nlr = 0.1\n', 3, ("[optimizer]", "name")),
        ('model = "a"\ndata = = "b"\n', 2, ("TOML",)),
        ('model = "a"\n[optimizer]\nname = "sgd"\nworkers = 3\n[wrong]\nx = 1\n', 5, ("'wrong'",)),
    ],
)
def test_a_mistake_is_reported_with_file_line_and_what_is_allowed(tmp_path, text, line, facts):
    path = write(tmp_path, text)
    with pytest.raises(ConfigFileError) as caught:
        read_run_file(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert (caught.value.facts["path"], caught.value.facts["line"]) == (str(path), line)
    assert not [fact for fact in facts if fact not in str(caught.value)], caught.value


def test_a_file_without_a_model_or_data_says_which_is_missing(tmp_path):
    with pytest.raises(ConfigFileError, match="data is missing"):
        read_run_file(write(tmp_path, 'model = "a"\n'))


def test_a_missing_or_unreadable_file_is_no_traceback(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_run_file(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        read_run_file(binary)


def test_a_run_file_says_how_to_save_memory(tmp_path):
    text = 'model = "a"\ndata = "b"\nmemory_limit = 900\ncheckpoint_activations = true\n'
    assert read_run_file(write(tmp_path, text)).config == {"memory_limit": 900, "checkpoint_activations": True}
    with pytest.raises(ConfigFileError, match=r"checkpoint_activations is 1\b.*true or false"):
        read_run_file(write(tmp_path, 'model = "a"\ndata = "b"\ncheckpoint_activations = 1\n'))
