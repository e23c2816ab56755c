"""Exceptions: their messages, the nearest names, and their way from process to process."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from syncline import errors
from syncline.comms.shared_memory import SharedMemoryFull
from syncline.errors import ConfigError, ConfigFileError, Interrupted, SynclineError, UnknownName, nearest

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", [*CLASSES, SharedMemoryFull])
def test_every_exception_survives_pickling_with_its_message_and_notes(cls):
    error = cls("lr is -1, but must be more than 0.")
    error.add_note("This happened on worker 3.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.__notes__ == ["This happened on worker 3."]


def test_errors_made_by_their_own_constructors_survive_pickling():
    for error in (
        UnknownName.among("model", "lenett", ["lenet", "mlp"]),
        ConfigFileError.at(Path("run.toml"), 3, "There is no setting 'wrokers'."),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))


def test_every_class_is_public_and_drawn_in_the_tree():
    assert {c.__name__ for c in CLASSES} | {"nearest"} == set(errors.__all__)
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
    assert str(UnknownName.among("model", "lenett", ["mlp", "lenet"])) == (
        "There is no model 'lenett'. Did you mean 'lenet'? Known: lenet, mlp."
    )


def test_an_unknown_name_without_neighbours_brings_the_known_ones():
    assert str(UnknownName.among("model", "xyz", ["mlp", "lenet"])) == "There is no model 'xyz'. Known: lenet, mlp."


def test_several_neighbours_are_offered_best_first():
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
