"""Recomputes oracle_templates.json and oracle_tokenizers.json with transformers and sentencepiece.

    python tests/text/make_oracle.py

Inputs are kept: the template cases in the file itself, the tokenizers' texts and files below.
"""

import json
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two leading spaces and a trailing one ",
    "tabs\tand\n\nnewlines\r\n  mixed \n \n",
    "In 1969, 12345678 people; 3.14159 times ½ of ²³ and ٣٤",
    "don't WE'LL you'd I'VE it'S",
    "snake_case camelCase HTTPServer <b>tag</b> ->>= ==",
    "Übung 练习造就完美 ελληνικά नमस्ते 日本語テキスト",
    "🌶️ 👩‍👩‍👧 e\u0301 \u00e9 \ufeff \x00 \u2028",
    "a\u2581b <0x41> <s> </s> [INST]",
    "<tag>in<tag> </tag>",
]

CORPUS = (
    """The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs, jumps and runs.
In a hole in the ground there lived a small robot who counted 1, 2, 3, 10, 100 and 1000 stars.
Every morning the robot walked to the sea and looked at the waves. Übung macht den Meister.
def count(stars): return sum(1 for star in stars if star.bright) # the robot's own program
練習は人を育てる。练习造就完美。 The end of the story is the beginning of the next story.
"""
    * 4
)

SPLITTERS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35")


def make_templates():
    """Returns the template cases with transformers' renderings."""
    from transformers import PreTrainedTokenizerFast

    from jaxinfer.testing import byte_tokenizer

    cases = json.loads((HERE / "oracle_templates.json").read_text(encoding="utf-8"))
    for case in cases:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=byte_tokenizer()._backend, **case.get("special_tokens", {})
        )
        tokenizer.chat_template = case["template"]
        case["rendered"] = tokenizer.apply_chat_template(
            case["messages"], tokenize=False, **case.get("options", {})
        )
    return cases


def make_tokenizers():
    """Returns tokenizers in their files' form, with what the outside oracle makes of TEXTS."""
    return {
        "texts": TEXTS,
        "sentencepiece": {
            "space_prefix": _sentencepiece(add_dummy_prefix=True),
            "no_space_prefix": _sentencepiece(add_dummy_prefix=False),
        },
        "splits": {name: _splits(name) for name in SPLITTERS},
        "directories": {name: _directory(name) for name in ("post_processor", "config", "spm")},
    }


def _sentencepiece(add_dummy_prefix):
    import sentencepiece

    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus.txt"
        corpus.write_text(CORPUS, encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=f"{scratch}/tiny",
            model_type="bpe",
            vocab_size=480,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=add_dummy_prefix,
            # Where texts get a space prefix, GGUF's convention gives one to every text between
            # user-defined tokens as well, sentencepiece only to the first.
            user_defined_symbols=[] if add_dummy_prefix else ["<tag>", "\n\n"],
            minloglevel=2,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=f"{scratch}/tiny.model")
    indices = range(model.get_piece_size())
    encoded = [model.encode(text) for text in TEXTS]
    return {
        "tokens": [model.id_to_piece(index) for index in indices],
        "scores": [model.get_score(index) for index in indices],
        "types": [_token_type(model, index) for index in indices],
        "ids": encoded,
        "decoded": [model.decode(ids) for ids in encoded],
    }


def _token_type(model, index):
    if model.is_unknown(index):
        return 2
    if model.is_control(index):
        return 3
    if model.is_byte(index):
        return 6
    return 4 if model.id_to_piece(index) in ("<tag>", "\n\n") else 1


def _splits(name):
    """Returns how transformers' own tokenizer of that family cuts each text."""
    from tokenizers import pre_tokenizers
    from transformers import GPT2Tokenizer, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    if name == "llama-bpe":
        pattern = TikTokenConverter("unused").pattern
        cut = pre_tokenizers.Sequence([_split(pattern), _byte_level(use_regex=False)])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        cut = pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
    else:
        family = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer, "qwen35": Qwen3_5Tokenizer}
        cut = family[name]().backend_tokenizer.pre_tokenizer
    return [[word for word, _ in cut.pre_tokenize_str(text)] for text in TEXTS]


def _split(pattern):
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _byte_level(use_regex):
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _directory(name):
    """Returns a model directory's files, and what transformers makes of it."""
    from transformers import AutoTokenizer

    files = _directory_files(name)
    with tempfile.TemporaryDirectory() as scratch:
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (Path(scratch) / file).write_text(text, encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(scratch)
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        return {
            "files": files,
            "ids": ids,
            "plain_ids": [tokenizer(t, add_special_tokens=False)["input_ids"] for t in TEXTS],
            "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rendered": tokenizer.apply_chat_template(
                [{"role": "user", "content": "hi"}], tokenize=False
            ),
        }


def _directory_files(name):
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers

    special = [AddedToken(text, special=True) for text in ("<s>", "</s>")]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}old"}
    if name == "spm":
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        fallback = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=fallback, show_progress=False, max_token_length=8
        )
        backend.train_from_iterator(CORPUS.splitlines(), trainer)
    else:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = _byte_level(use_regex=True)
        backend.decoder = decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(CORPUS.splitlines(), trainer)
    backend.add_tokens(special)
    files = {"tokenizer_config.json": config}
    if name == "post_processor":
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            special_tokens=[
                ("<s>", backend.token_to_id("<s>")),
                ("</s>", backend.token_to_id("</s>")),
            ],
        )
        backend.enable_truncation(4)  # must not cut prompts; transformers keeps it off as well
        config |= {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    elif name == "config":
        next_id = backend.get_vocab_size()
        config |= {
            "add_bos_token": True,  # ignored
            "bos_token": "<s>",
            "eos_token": "</s>",
            "added_tokens_decoder": {str(next_id): {"content": "<tag>", "special": False}},
        }
        files["chat_template.jinja"] = "{{ bos_token }}new{{ eos_token }}"
    else:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        config |= {"add_bos_token": False, "add_eos_token": True}  # ignored
        config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files["tokenizer.json"] = json.loads(backend.to_str())
    return files


def main():
    """Writes both files."""
    for name, content in (("templates", make_templates()), ("tokenizers", make_tokenizers())):
        indent = 1 if name == "templates" else None
        text = json.dumps(content, ensure_ascii=False, indent=indent)
        (HERE / f"oracle_{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
