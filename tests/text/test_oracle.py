"""Chat templates and tokenizers against what transformers and sentencepiece made of them."""

import json
import runpy
from pathlib import Path

import pytest

from jaxinfer.text import ChatTemplate, load_tokenizer
from jaxinfer.text.gguf_tokenizer import word_splitter
from jaxinfer.text.pre_tokenizers import PRE_TOKENIZERS

HERE = Path(__file__).parent
TEMPLATES = json.loads((HERE / "oracle_templates.json").read_text(encoding="utf-8"))
TOKENIZERS = json.loads((HERE / "oracle_tokenizers.json").read_text(encoding="utf-8"))
TEXTS = TOKENIZERS["texts"]


@pytest.mark.parametrize("case", TEMPLATES, ids=[case["name"] for case in TEMPLATES])
def test_rendering_equals_transformers(case):
    template = ChatTemplate(case["template"], case["special_tokens"])
    options = {"add_generation_prompt": False} | case["options"]
    assert template.render(case["messages"], **options) == case["rendered"]


@pytest.mark.parametrize("name", TOKENIZERS["splits"])
def test_words_equal_transformers(name):
    splitter = word_splitter(PRE_TOKENIZERS[name].patterns)
    ours = [[word for word, _ in splitter.pre_tokenize_str(text)] for text in TEXTS]
    assert ours == TOKENIZERS["splits"][name]


def spm_metadata(name):
    case = TOKENIZERS["sentencepiece"][name]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": case["tokens"],
        "tokenizer.ggml.scores": case["scores"],
        "tokenizer.ggml.token_type": case["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": name == "space_prefix",
    }


@pytest.mark.parametrize("name", TOKENIZERS["sentencepiece"])
@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_scores_give_the_ids_of_sentencepiece(name, index):
    text = TEXTS[index]
    case = TOKENIZERS["sentencepiece"][name]
    tokenizer = load_tokenizer(spm_metadata(name))
    if "<s>" not in text:  # sentencepiece never reads control tokens out of text
        assert tokenizer.encode(text) == case["ids"][index]
    assert tokenizer.decode(case["ids"][index]) == case["decoded"][index]


@pytest.mark.parametrize("name", TOKENIZERS["directories"])
def test_directory_equals_transformers(name, tmp_path):
    case = TOKENIZERS["directories"][name]
    for file, content in case["files"].items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / file).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == case["ids"]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert plain == case["plain_ids"]
    assert [tokenizer.decode(ids) for ids in case["ids"]] == case["decoded"]
    assert tokenizer.bos_token_id == case["bos_token_id"]
    assert list(tokenizer.eos_token_ids) == [case["eos_token_id"]]
    template = ChatTemplate.from_tokenizer(tokenizer)
    rendered = template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert rendered == case["rendered"]


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
def test_committed_values_are_what_the_oracle_says_now():
    for package in ("transformers", "sentencepiece"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[oracle]'")
    script = runpy.run_path(str(HERE / "make_oracle.py"))
    assert script["make_templates"]() == TEMPLATES
    assert script["make_tokenizers"]() == TOKENIZERS
