"""The leaf: what a Grammar may be made of, and where SamplingParams take one."""

import dataclasses

import pytest

import jaxinfer
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

GOOD = [
    ("json_schema", {"type": "object"}),
    ("json_schema", True),
    ("json_object", None),
    ("regex", "a+"),
    ("lark", 'start: "a"'),
    ("choice", ("yes", "no")),
]


@pytest.mark.parametrize(("kind", "value"), GOOD)
def test_what_a_grammar_is_made_of(kind, value):
    grammar = Grammar(kind, value)
    assert (grammar.kind, grammar.value, grammar.param) == (kind, value, "grammar")
    assert SamplingParams(grammar=grammar).for_choice(1, 0).grammar is grammar


def test_a_list_of_choices_becomes_a_tuple():
    assert Grammar("choice", ["a", "b"]).value == ("a", "b")


def test_the_parameter_it_came_from_is_no_part_of_it():
    assert Grammar("regex", "a", param="guided_regex") == Grammar("regex", "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Grammar("regex", "a").value = "b"


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("json", {}, "must be one of json_schema, json_object, regex, lark, choice, got 'json'"),
        ("json_schema", "{}", "json_schema takes a schema, as a dict or a bool, got a str"),
        ("json_object", {}, "json_object takes no value, got a dict"),
        ("regex", None, "regex takes a pattern, got a NoneType"),
        ("regex", b"a", "regex takes a pattern, got a bytes"),
        ("lark", 1, "lark takes the grammar's text, got a int"),
        ("choice", "yes", "choice takes a tuple of texts, got a str"),
        ("choice", (), "at least one text"),
        ("choice", ("a", 1), "only texts"),
    ],
)
def test_what_it_is_not_made_of(kind, value, says):
    with pytest.raises(ValueError, match=says):
        Grammar(kind, value)


@pytest.mark.parametrize("grammar", [{"type": "object"}, "a+", True])
def test_settings_take_nothing_else(grammar):
    with pytest.raises(InvalidParameter, match="grammar must be a Grammar") as error:
        SamplingParams(grammar=grammar)
    assert error.value.param == "grammar"


def test_it_is_among_the_names_of_the_package():
    assert jaxinfer.Grammar is Grammar
