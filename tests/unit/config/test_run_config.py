"""How to run: every setting is explained, checked when it is made, and named when it is wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from syncline.config.run import RunConfig, describe
from syncline.errors import ConfigError


def refused(**settings: Any) -> dict[str, Any]:
    """The facts of the error that these settings raise; the message shows the setting and its value."""
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings)
    facts = caught.value.facts
    assert caught.value.code == "invalid-setting"
    assert str(caught.value).startswith(f"{facts['setting']} is {facts['value']!r}")
    return facts


def test_every_default_is_allowed():
    assert RunConfig() == RunConfig(workers=2, strategy="allreduce", device="auto")


def test_every_setting_is_explained_in_a_sentence():
    sentences = describe(RunConfig)
    assert set(sentences) == {f.name for f in dataclasses.fields(RunConfig)}
    for sentence in sentences.values():
        assert sentence[0].isupper() or sentence[0] == "'", sentence
        assert sentence.endswith("."), sentence


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("workers", 1), ("accumulate", 1), ("keep_checkpoints", 1), ("seed", 0), ("evaluate_every", 0), ("epochs", 1),
        ("batch", 1), ("threads", 1), ("max_steps", 1), ("checkpoint_every_steps", 1), ("loaders", 0),
    ],
)  # fmt: skip
def test_a_count_below_its_least_is_refused_and_the_least_is_not(name, least):
    assert getattr(RunConfig(**{name: least}), name) == least
    assert refused(**{name: least - 1}) == {"setting": name, "value": least - 1, "least": least}


@pytest.mark.parametrize("value", [0, 0.0, -1.5, math.nan])
@pytest.mark.parametrize("name", ["checkpoint_every_s", "exchange_timeout_s", "shared_memory_limit_mb"])
def test_a_duration_or_an_amount_is_more_than_nothing(name, value):
    assert refused(**{name: value}) == {"setting": name, "value": value, "above": 0}


@pytest.mark.parametrize("value", [2.0, "2", True, [2]])
@pytest.mark.parametrize("name", ["workers", "epochs", "seed"])
def test_a_count_is_an_integer(name, value):
    assert refused(**{name: value}) == {"setting": name, "value": value}


def test_a_duration_is_a_number():
    assert refused(checkpoint_every_s="30") == {"setting": "checkpoint_every_s", "value": "30"}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("device", ["auto", "cpu", "cuda"]),
        ("on_nan", ["stop", "skip"]),
        ("batch_norm", ["global", "local"]),
        ("collective", ["auto", "shared-memory", "process-group"]),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(name, allowed):
    assert refused(**{name: "gpu"}) == {"setting": name, "value": "gpu", "allowed": allowed}
    with pytest.raises(ConfigError, match=".*".join(allowed)):
        RunConfig(**{name: "gpu"})


def test_an_apple_gpu_is_refused_and_the_message_says_why():
    assert refused(device="mps")["allowed"] == ["auto", "cpu", "cuda"]
    with pytest.raises(ConfigError, match="Linux"):
        RunConfig(device="mps")  # type: ignore[arg-type]


def test_a_run_has_at_most_1024_workers():
    assert RunConfig(workers=1024).workers == 1024
    assert refused(workers=1025) == {"setting": "workers", "value": 1025, "most": 1024}


def test_a_mistake_is_also_a_value_error():
    with pytest.raises(ValueError):
        RunConfig(workers=0)


def test_a_changed_copy_is_checked_and_leaves_the_original():
    config = RunConfig(workers=3)
    assert config.replace(batch=16) == RunConfig(workers=3, batch=16)
    assert config.batch is None
    with pytest.raises(ConfigError, match="batch is 0"):
        config.replace(batch=0)


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().workers = 3  # type: ignore[misc]


def test_settings_are_given_by_name_only():
    make: Any = RunConfig
    with pytest.raises(TypeError):
        make(2)


@pytest.mark.parametrize("amount", ["900MB", "2 GB", "750", 900, 0.5])
def test_a_memory_limit_is_an_amount(amount):
    assert RunConfig(memory_limit=amount).memory_limit == amount


@pytest.mark.parametrize("amount", ["much", "-2GB", 0])
def test_a_memory_limit_that_is_not_an_amount_is_refused(amount):
    assert refused(memory_limit=amount) == {"setting": "memory_limit", "value": amount}


def test_a_flag_is_true_or_false():
    assert refused(checkpoint_activations="yes") == {"setting": "checkpoint_activations", "value": "yes"}


@pytest.mark.parametrize("name", ["../../evil", "a/b", "/etc", "..", ".", ".hidden", "", "a\0b", "a\nb", "\udcff", 3])
def test_a_name_that_leaves_its_folder_or_cannot_be_seen_there_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        RunConfig(name=name)
    assert caught.value.code in ("invalid-setting", "not-utf8")
    assert caught.value.facts["setting"] == "name"


@pytest.mark.parametrize("name", ["run", "lenet-mnist.2", "my run", "Überlauf", "a..b"])
def test_an_ordinary_name_is_accepted(name):
    assert RunConfig(name=name).name == name
