"""Exceptions: their messages, the nearest names, and their way from process to process."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from syncline import errors
from syncline.comms.shared_memory import SharedMemoryFull
from syncline.errors import (
    ConfigError,
    ConfigFileError,
    Interrupted,
    SynclineError,
    UnknownName,
    check_options,
    did_you_mean,
    nearest,
)

CLASSES = [
    c for name, c in inspect.getmembers(errors, inspect.isclass)
    if c.__module__ == errors.__name__ and not name.startswith("_")
]  # fmt: skip


@pytest.mark.parametrize("cls", [*CLASSES, SharedMemoryFull])
def test_every_exception_survives_pickling_with_its_message_and_notes(cls):
    error = cls("lr is -1, but must be more than 0.", code="too-small", setting="lr", value=-1)
    error.add_note("This happened on worker 3.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert (copy.code, copy.facts) == ("too-small", {"setting": "lr", "value": -1})
    assert copy.__notes__ == ["This happened on worker 3."]


def test_errors_made_by_their_own_constructors_survive_pickling():
    for error in (
        UnknownName.among("model", "lenett", ["lenet", "mlp"]),
        ConfigFileError.at(Path("run.toml"), 3, "There is no setting 'wrokers'."),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code) == (type(error), str(error), error.code)
        assert copy.facts == error.facts


def test_a_type_has_a_code_of_its_own_and_every_error_its_values():
    error = UnknownName.among("model", "lenett", ["lenet", "mlp"])
    assert error.code == "unknown-name"
    assert error.facts == {"kind": "model", "name": "lenett", "nearest": ["lenet"], "known": ["lenet", "mlp"]}
    assert len({cls("").code for cls in CLASSES}) == len(CLASSES)


def test_every_class_is_public_and_drawn_in_the_tree():
    functions = {"check_options", "did_you_mean", "nearest", "plural"}
    assert {c.__name__ for c in CLASSES} | functions == set(errors.__all__)
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[ │├└─]*([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert {c.__name__ for c in CLASSES} <= set(drawn)


def test_one_root_catches_all_but_an_interruption():
    assert all(issubclass(c, SynclineError) for c in CLASSES if c is not Interrupted)
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)  # `except Exception` in a user's script lets it through


def test_a_wrong_setting_is_a_value_error():
    assert all(issubclass(c, ValueError) for c in (ConfigError, UnknownName, ConfigFileError))


def test_an_unknown_name_brings_the_nearest_and_all_known_ones():
    error = UnknownName.among("model", "lenett", ["mlp", "lenet"])
    assert error.facts["nearest"] == ["lenet"]
    assert did_you_mean("lenett", ["mlp", "lenet"]) == "Did you mean 'lenet'? Known: mlp, lenet."


def test_an_unknown_name_without_neighbors_brings_the_known_ones():
    assert did_you_mean("xyz", ["mlp", "lenet"]) == "Known: mlp, lenet."


def test_an_unknown_option_names_its_owner_and_the_nearest_options():
    with pytest.raises(UnknownName) as caught:
        check_options("sgd", {"lr": 1, "momentun": 0.9}, ["lr", "momentum"])
    assert caught.value.code == "unknown-option"
    assert caught.value.facts == {
        "owner": "sgd", "kind": "option", "name": "momentun", "nearest": ["momentum"], "known": ["lr", "momentum"],
    }  # fmt: skip


def test_options_that_exist_pass_the_check():
    check_options("sgd", {"lr": 1}, ["lr", "momentum"])


def test_a_mistake_in_a_file_keeps_the_facts_of_the_mistake():
    error = ConfigFileError.at(Path("run.toml"), 3, UnknownName.among("setting", "wrokers", ["workers"]))
    assert error.code == "unknown-name"
    assert (error.facts["name"], error.facts["nearest"], error.facts["line"]) == ("wrokers", ["workers"], 3)


def test_several_neighbors_are_offered_best_first():
    text = str(UnknownName.among("loss", "l1los", ["l1_loss", "l1loss", "mse"]))
    assert "Did you mean 'l1loss' or 'l1_loss'?" in text


def test_many_known_names_are_not_listed():
    text = str(UnknownName.among("loss", "name7", [f"name{i}x" for i in range(21)]))
    assert "Known" not in text
    assert "'name7x'" in text


def test_nothing_known_is_not_listed():
    assert str(UnknownName.among("model", "x", [], more="Register one.")) == "There is no model 'x'. Register one."


def test_a_mistake_in_a_file_starts_with_where_it_is():
    assert str(ConfigFileError.at(Path("a/run.toml"), 3, "Bad.")) == "a/run.toml:3: Bad."
    assert str(ConfigFileError.at(Path("a/run.toml"), None, "Bad.")) == "a/run.toml: Bad."


def test_nearest_ignores_case_and_keeps_the_spelling_of_what_is_known():
    assert nearest("adamw", ["AdamW", "Adam", "SGD"]) == ["AdamW", "Adam"]


def test_nearest_gives_no_more_than_asked_for():
    known = [f"name{i}" for i in range(10)]
    assert len(nearest("name", known)) == 3
    assert len(nearest("name", known, count=1)) == 1


def test_nothing_is_near_to_something_quite_different():
    assert nearest("quasar", ["mlp", "lenet"]) == []
