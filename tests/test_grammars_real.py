"""A real model, its own tokenizer: what it writes is what was asked for, and no longer."""

import json
import re

import pytest

from jaxinfer import LLM, Grammar, InvalidParameter, SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "languages": {"type": "array", "items": {"enum": ["en", "fr", "日本語"]}, "maxItems": 3},
    },
    "required": ["name", "age", "born", "languages"],
    "additionalProperties": False,
}
PROMPTS = ["Describe a person.", "Who wrote Faust?", "Quelqu'un d'autre:", "{"]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def llm(request):
    path = request.getfixturevalue(f"{request.param}_path")
    with LLM(str(path), max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        yield llm


def generate(llm, grammar, **params):
    settings = SamplingParams(grammar=grammar, max_tokens=160, seed=1, **params)
    outputs = llm.generate(PROMPTS, settings, progress=False)
    for output in outputs:
        for choice in output.outputs:
            assert choice.finish_reason == "stop", choice
            yield choice.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_fits_its_schema(llm, temperature):
    for text in generate(llm, Grammar("json_schema", PERSON), temperature=temperature, n=2):
        value = json.loads(text)
        assert list(value) == ["name", "age", "born", "languages"]
        assert len(value["name"]) <= 30
        assert 0 <= value["age"] <= 150
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", value["born"])
        assert set(value["languages"]) <= {"en", "fr", "日本語"}


def test_patterns_choices_and_grammars(llm):
    pattern = r"[A-ZÄÖÜ][a-zäöüß]{2,9}, \d{2} years"
    assert all(re.fullmatch(pattern, text) for text in generate(llm, Grammar("regex", pattern)))
    choices = ("positive", "negative", "not sure")
    assert set(generate(llm, Grammar("choice", choices))) <= set(choices)
    gbnf = 'root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]?'
    for text in generate(llm, Grammar("lark", gbnf)):
        assert re.fullmatch(r"[1-9][0-9]?( \+ [1-9][0-9]?){1,3}", text)


def test_a_wrong_one_is_refused_at_once(llm):
    with pytest.raises(InvalidParameter, match="grammar cannot be used: Invalid type"):
        llm.generate("x", grammar=Grammar("json_schema", {"type": "person"}), progress=False)
