"""How to run: every setting is explained, checked when it is made, and named when it is wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from syncline.config.run import RunConfig, describe
from syncline.errors import ConfigError


def test_every_default_is_allowed():
    assert RunConfig() == RunConfig(workers=2, strategy="allreduce", device="cpu")


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
    with pytest.raises(ConfigError, match=f"^{name} is {least - 1}, but must be {least} or more.$"):
        RunConfig(**{name: least - 1})


@pytest.mark.parametrize("value", [0, 0.0, -1.5, math.nan])
@pytest.mark.parametrize("name", ["checkpoint_every_s", "exchange_timeout_s", "shared_memory_limit_mb"])
def test_a_duration_or_an_amount_is_more_than_nothing(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is {value:g}, but must be more than 0.$"):
        RunConfig(**{name: value})


@pytest.mark.parametrize("value", [2.0, "2", True, [2]])
@pytest.mark.parametrize("name", ["workers", "epochs", "seed"])
def test_a_count_is_a_whole_number(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*, but must be a whole number.$"):
        RunConfig(**{name: value})


def test_a_duration_is_a_number():
    with pytest.raises(ConfigError, match=r"^checkpoint_every_s is '30', but must be a number\.$"):
        RunConfig(checkpoint_every_s="30")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("device", "'auto', 'cpu', 'cuda', 'mps'"),
        ("on_nan", "'stop', 'skip'"),
        ("batch_norm", "'global', 'local'"),
        ("collective", "'auto', 'shared-memory', 'process-group'"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(name, allowed):
    with pytest.raises(ConfigError, match=f"^{name} is 'gpu', but must be one of {allowed}.$"):
        RunConfig(**{name: "gpu"})


def test_a_run_has_at_most_1024_workers():
    assert RunConfig(workers=1024).workers == 1024
    with pytest.raises(ConfigError, match=r"^workers is 1025; one run has at most 1024\.$"):
        RunConfig(workers=1025)


def test_a_mistake_is_also_a_value_error():
    with pytest.raises(ValueError):
        RunConfig(workers=0)


def test_a_changed_copy_is_checked_and_leaves_the_original():
    config = RunConfig(workers=3)
    assert config.replace(batch=16) == RunConfig(workers=3, batch=16)
    assert config.batch is None
    with pytest.raises(ConfigError, match=r"^batch is 0, "):
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
def test_a_memory_limit_that_is_none_is_refused(amount):
    with pytest.raises(ConfigError, match=f"^memory_limit is {amount!r}, but must be an amount of memory such as"):
        RunConfig(memory_limit=amount)


def test_a_flag_is_true_or_false():
    with pytest.raises(ConfigError, match=r"^checkpoint_activations is 'yes', but must be true or false\.$"):
        RunConfig(checkpoint_activations="yes")  # type: ignore[arg-type]
