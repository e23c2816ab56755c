"""The settings of a run as it saved them: used if they are sound, refused with the file's name if not."""

from __future__ import annotations

import dataclasses
import json

import pytest

from syncline.config.run import RunConfig, read_settings
from syncline.errors import ConfigError, ConfigFileError


def refused(path) -> ConfigFileError:
    with pytest.raises(ConfigFileError) as caught:
        read_settings(path)
    assert caught.value.facts["path"] == str(path)
    return caught.value


def test_what_a_run_saved_is_read_back(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(RunConfig(workers=3, name="a"))))
    assert RunConfig(**read_settings(path)) == RunConfig(workers=3, name="a")


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", '"a"', "\udcff", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert refused(path).code == "damaged-config"


def test_a_missing_file_is_refused(tmp_path):
    assert refused(tmp_path / "config.json").code == "damaged-config"


def test_an_unknown_setting_is_named_with_the_nearest(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"worker": 3}')
    error = refused(path)
    assert error.code == "unknown-option"
    assert error.facts["name"] == "worker"
    assert "workers" in error.facts["nearest"]


@pytest.mark.parametrize(
    "settings",
    [{"workers": None}, {"strategy": 3}, {"out": ["runs"]}, {"name": 7}, {"seed": 2**70}, {"epochs": 10**30},
     {"checkpoint_every_s": True}, {"exchange_timeout_s": 1e30}, {"checkpoint_activations": 1}, {"memory_limit": {}},
     {"memory_limit": "9" * 400 + "GB"}],
)  # fmt: skip
def test_a_value_that_a_setting_cannot_have_is_named(tmp_path, settings):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    error = refused(path)
    assert error.code == "invalid-setting"
    assert error.facts["setting"] == next(iter(settings))


def test_a_seed_has_at_most_63_bits():
    assert RunConfig(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ConfigError) as caught:
        RunConfig(seed=2**70)
    assert caught.value.facts == {"setting": "seed", "value": 2**70, "most": 2**63 - 1}


@pytest.mark.parametrize("setting", ["name", "out", "strategy", "engine"])
def test_text_that_no_file_can_hold_is_refused(setting):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{setting: "a\udcffb"})
    assert (caught.value.code, caught.value.facts["setting"]) == ("not-utf8", setting)
    with pytest.raises(ConfigError):
        RunConfig(**{setting: "a\0b"})


def test_a_path_may_be_given_as_such(tmp_path):
    assert RunConfig(out=tmp_path, resume=tmp_path) == RunConfig(out=str(tmp_path), resume=str(tmp_path))
