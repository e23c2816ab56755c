"""Names with options: reading and printing are inverse, and nothing but a ConfigError comes out of a bad text."""

from __future__ import annotations

import math

import pytest
from generators import specs
from hypothesis import given
from hypothesis import strategies as st

from syncline.config.spec import Spec
from syncline.errors import ConfigError


@given(specs)
def test_what_is_printed_reads_as_the_same(spec):
    assert Spec.parse(str(spec)) == spec


@given(specs)
def test_types_survive_the_text(spec):
    read = Spec.parse(str(spec))
    assert repr(read) == repr(spec)  # unlike ==, tells 1 from True and 1.0


@given(specs, st.sampled_from(["", " ", "\n", "\t "]), st.sampled_from(["", " ", "\n"]))
def test_space_around_does_not_matter(spec, before, after):
    assert Spec.parse(before + str(spec) + after) == spec


@given(st.text(max_size=40) | st.text("f(a=1,'\"[]{}:\\\0-) \n", max_size=20))
def test_any_text_is_read_or_refused_as_a_mistake_in_the_configuration(text):
    try:
        spec = Spec.parse(text)
    except ConfigError:
        return
    assert Spec.parse(str(spec)) == spec


@given(specs)
def test_a_table_gives_the_same_with_lists_made_tuples(spec):
    table = {"name": spec.name, **{k: v for k, v in spec.options.items() if k != "name"}}
    made = Spec.of(table, what="model")
    assert made.name == spec.name
    assert all(not isinstance(value, list) for value in made.options.values())


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sgd", "sgd", {}),
        ("sgd()", "sgd", {}),
        (" sgd ( lr = 0.1 ) ", "sgd", {"lr": 0.1}),
        ("server-sync(every=4)", "server-sync", {"every": 4}),
        ("timm:resnet50(pretrained=False)", "timm:resnet50", {"pretrained": False}),
        ("mlp(hidden=(64, 32), act='relu',)", "mlp", {"hidden": (64, 32), "act": "relu"}),
        ("f(a=-1, b=None, c={'d': [1]})", "f", {"a": -1, "b": None, "c": {"d": [1]}}),
        ("clip(at=inf, both=(-inf, inf))", "clip", {"at": math.inf, "both": (-math.inf, math.inf)}),
    ],
)  # fmt: skip
def test_people_write_specs_like_this(text, name, options):
    assert Spec.parse(text) == Spec(name, options)


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "(lr=1)", "two words", "sgd lr=0.1", "sgd(lr=0.1", "sgd(lr=0.1))", "sgd(lr=)", "sgd(lr=0.1) extra",
        "sgd(lr=1)(lr=2)", "sgd(lr=1).real(a=2)", "sgd(lr=1)[0]", "sgd(lr=x)", "sgd(lr=f(1))", "sgd(a={[]: 1})",
        "sgd(a=__import__('os'))", "sgd(lr=1 + 2)", "f(a='\0')", "f(a=" + "[" * 500 + "]" * 500 + ")",
    ],
)  # fmt: skip
def test_what_is_no_spec_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"sgd\(lr=0\.1\)") as caught:
        Spec.parse(text)
    assert (caught.value.code, caught.value.facts) == ("invalid-spec", {"text": text})
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["sgd(0.1)", "sgd(*[1])", "sgd(**{'lr': 1})"])
def test_options_without_a_name_are_refused(text):
    with pytest.raises(ConfigError, match="needs a name"):
        Spec.parse(text)


def test_an_option_given_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        Spec.parse("sgd(lr=0.1, lr=0.2)")


def test_nothing_in_a_spec_is_executed(tmp_path):
    target = tmp_path / "made"
    with pytest.raises(ConfigError):
        Spec.parse(f"sgd(lr=open({str(target)!r}, 'w'))")
    assert not target.exists()


def test_a_spec_is_made_of_what_a_caller_has():
    spec = Spec("mlp", {"hidden": ((64, 32), 16)})
    assert Spec.of(spec, what="model") is spec
    assert Spec.of("mlp(hidden=((64, 32), 16))", what="model") == spec
    assert Spec.of({"name": "mlp", "hidden": [[64, 32], 16]}, what="model") == spec


def test_a_table_without_a_name_is_refused():
    for table in ({}, {"hidden": 3}, {"name": 3}):
        with pytest.raises(ConfigError, match=r"\[model\].*name ="):
            Spec.of(table, what="model")


def test_something_else_is_refused_with_its_value():
    with pytest.raises(ConfigError, match=r"model is 3\b.*name"):
        Spec.of(3, what="model")


def test_options_can_be_set_later():
    spec = Spec.parse("sgd(lr=0.1)")
    assert spec.with_options(momentum=0.9, lr=0.2) == Spec("sgd", {"lr": 0.2, "momentum": 0.9})
    assert spec == Spec("sgd", {"lr": 0.1})
