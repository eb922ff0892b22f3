"""`jaxinfer eval`: the maths against numpy, the paged path against a whole forward, the command."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine
from checkpoint.builders import safetensors_bytes
from hypothesis import given
from hypothesis import strategies as st
from models.conftest import PagedModel, make_context
from models.oracle_cases import tensor

from jaxinfer import cli, eval_cli, evaluation
from jaxinfer.models import load_model_module
from jaxinfer.runner.kv_cache import CacheSpec
from jaxinfer.runner.loader import expected_shapes, make_abstract_model
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text.tokenizer import add_sequence_tokens

BOS = 256
TEXT = "Wind south-east, force one. Three ships, and 47 gulls: größer als gestern.\n"
WINDOW, STRIDE, CHUNK, PAGE_SIZE = 20, 12, 8, 4


def float64_logprobs(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# Windows.


@given(st.integers(2, 60), st.integers(2, 30), st.integers(1, 30), st.sampled_from([None, 7]))
def test_windows_predict_each_token_once_after_enough_context(count, length, stride, bos):
    ids = list(range(100, 100 + count))
    if stride >= length:
        with pytest.raises(ValueError, match=f"stride is {stride}"):
            evaluation.make_windows(ids, length, stride, bos)
        return
    windows = evaluation.make_windows(ids, length, stride, bos)
    predicted = evaluation.targets_of(windows).tolist()
    assert predicted == ids[bos is None :]
    for i, window in enumerate(windows):
        assert len(window.token_ids) <= length
        assert window.num_scored < len(window.token_ids)
        assert i == 0 or len(window.token_ids) - window.num_scored >= length - stride
        body = window.token_ids if bos is None else window.token_ids[1:]
        assert bos is None or window.token_ids[0] == bos
        assert body == tuple(range(body[0], body[0] + len(body))), "nothing is skipped"


@pytest.mark.parametrize(("count", "length", "bos"), [(1, 8, None), (0, 8, 7), (9, 1, None)])
def test_nothing_to_predict_is_refused(count, length, bos):
    with pytest.raises(ValueError, match=r"nothing to predict|window 1"):
        evaluation.make_windows(list(range(count)), length, 1, bos)


# Maths.


def test_divergence_of_distributions_equals_float64():
    rng = np.random.default_rng(0)
    p = rng.standard_normal((6, 5000)).astype(np.float32) * 4
    noise = rng.standard_normal(p.shape).astype(np.float32)
    # From what is nearly equal to what has nothing in common; one id is next to impossible.
    q = p + noise * np.array([1e-4, 1e-3, 1e-2, 1, 10, 0], np.float32)[:, None]
    p[4, 0], q[4, 1] = 120, 120
    log_p, log_q = float64_logprobs(p), float64_logprobs(q)
    expected = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    ours = [evaluation.log_softmax(jnp.asarray(logits)) for logits in (p, q)]
    kl = np.asarray(evaluation.kl_of(*ours))
    np.testing.assert_allclose(kl[:5], expected[:5], rtol=2e-3)
    assert kl[5] == 0
    assert (kl >= 0).all()
    same = np.asarray(evaluation.same_top(*ours))
    assert same.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()


# The paged path.


@pytest.fixture(scope="module")
def windows():
    return evaluation.make_windows(list(TEXT.encode()), WINDOW, STRIDE, BOS)


def read(windows, kv_dtype=np.float32):
    """The hidden states of a model with two KV groups, one of them windowed, and its KV bytes."""
    model, groups = tiny_engine.tiny_model("gemma3_text")
    config = model.config
    cache = CacheSpec(
        platform="cpu",
        dtype=np.dtype(kv_dtype),
        num_layers=config.num_layers,
        num_kv_heads=model.num_cache_kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
    )
    reader = evaluation.Reader(model, cache, len(groups), WINDOW, CHUNK)
    return reader.hidden(windows, "Reading", progress=False), reader.kv_bytes_per_token


@pytest.fixture(scope="module")
def exact(windows):
    """(model, hidden states, bytes of KV per token) in float32."""
    return tiny_engine.tiny_model("gemma3_text")[0], *read(windows)


def test_likelihood_equals_a_whole_forward(windows, exact):
    model, hidden, _ = exact
    nll = evaluation.likelihood(model, hidden, evaluation.targets_of(windows), progress=False)
    expected = []
    whole = PagedModel(model, num_seqs=len(windows))
    for row, window in enumerate(windows):
        logits = whole.step({row: list(window.token_ids[:-1])}, num_tokens=WINDOW)[row]
        targets = window.token_ids[-window.num_scored :]
        scored = float64_logprobs(logits)[-window.num_scored :]
        expected += [-row[token_id] for row, token_id in zip(scored, targets, strict=True)]
    assert len(nll) == len(TEXT.encode()) > 64, "more than one block of logits"
    np.testing.assert_allclose(nll, expected, atol=1e-5)


def test_divergence_of_a_model_from_itself_and_with_8_bits_of_kv(windows, exact):
    model, hidden, kv_bytes = exact
    rounded, fewer_bytes = read(windows, np.int8)
    assert fewer_bytes < kv_bytes
    targets = evaluation.targets_of(windows)
    # In one call: each compiles a program of its own.
    both = np.concatenate([hidden, rounded])
    found = evaluation.divergence(
        (model, np.tile(hidden, (2, 1))), (model, both), np.tile(targets, 2), progress=False
    )
    same, other = np.split(found.kl, 2)
    assert same.max() <= 1e-7
    assert found.is_same_top[: len(same)].all()
    assert 0 < other.mean() < 0.01
    assert (other >= 0).all()
    np.testing.assert_array_equal(*np.split(found.reference_nll, 2))
    assert np.abs(found.nll - found.reference_nll).max() > 1e-5


def test_logits_that_are_not_finite_are_an_error(windows):
    model, _ = tiny_engine.tiny_model()
    hidden = np.full((70, model.config.hidden_size), np.nan, np.float32)
    with pytest.raises(ValueError, match="not finite for 70 of 70 tokens"):
        evaluation.likelihood(model, hidden, np.zeros(70, np.int32), progress=False)


# The command.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a tiny llama whose tokens are bytes, `<s>` before each text."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def write_checkpoint(directory, model_type):
    module = load_model_module(model_type)
    config = module.TINY_HF_CONFIG | {"vocab_size": 258, "num_hidden_layers": 1}
    model = make_abstract_model(module, module.Config.from_hf(config), make_context())
    tensors = {
        name: tensor(name, shape, model_type)
        for name, shape in expected_shapes(model, module).items()
    }
    backend = byte_tokenizer()._backend
    add_sequence_tokens(backend, "<s>", None)
    backend.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


@pytest.fixture
def evaluate(checkpoint, tmp_path, capsys, monkeypatch):
    """Runs `jaxinfer eval` on the tiny model and TEXT; returns (lines printed, the JSON object)."""
    monkeypatch.setattr(eval_cli, "set_compilation_cache", lambda directory: None)
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")

    def run(measure, *flags):
        common = ["--model", str(checkpoint), "--text", str(path), "--page-size", str(PAGE_SIZE)]
        code = cli.main(["eval", measure, *common, "--window", "40", *flags])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        *lines, last = captured.out.splitlines()
        return lines, json.loads(last)

    return run


def test_kl_command(evaluate):
    lines, found = evaluate("kl", "--kv-cache-dtype", "bfloat16", "--dtype", "float32")
    assert found["settings"] == {
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "page_size": PAGE_SIZE,
    }
    num_tokens = len(TEXT.encode())
    assert (found["text"]["tokens"], found["predicted"]) == (num_tokens, num_tokens)
    assert (found["window"], found["stride"], found["bos"]) == (40, 20, BOS)
    assert 0 < found["kl_mean"] <= found["kl_p99"] <= found["kl_max"] < 0.01
    assert 0.9 <= found["top1_agreement"] <= 1
    candidate, exact = found["candidate"], found["exact"]
    assert candidate["kv_bytes_per_token"] * 2 == exact["kv_bytes_per_token"]
    assert candidate["weight_mb"] == exact["weight_mb"] > 0
    assert candidate["perplexity"] == pytest.approx(exact["perplexity"], rel=0.01)
    assert found["versions"].keys() == {"python", "jaxinfer", "jax", "jaxlib", "flax"}
    assert any(line.startswith("KL ") for line in lines)

    lines, alone = evaluate("perplexity", "--exact", "--json")
    assert lines == []
    assert alone["perplexity"] == np.exp(alone["nll"])
    assert alone["kv_cache"] == alone["activations"] == "float32"
    assert alone["nll"] == pytest.approx(exact["nll"], abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--window", "257"], 2, "window is 257, but the context is 256 tokens; lower it"),
        (["--stride", "99", "--window", "9"], 1, "stride is 99 and window 9"),
        (["--text", "none.txt"], 1, "none.txt"),
        (["--model-type", "qwen3"], 2, "model_type is 'qwen3'"),
    ],
)
def test_refusals(checkpoint, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr(eval_cli, "set_compilation_cache", lambda directory: None)
    assert cli.main(["eval", "perplexity", "--model", str(checkpoint), *flags]) == code
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer eval: ")
    assert message in error


def test_the_built_in_text_is_there_and_varied():
    text = eval_cli.read_text(None)
    assert 12_000 < len(text.encode()) < 16_000
    for sample in ("```python", "海", "ß", "|", "1. ", '"'):
        assert sample in text


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")  # torch's and transformers' own deprecations
def test_perplexity_equals_transformers(evaluate, checkpoint):
    torch = pytest.importorskip("torch", reason="needs the [oracle] extra")
    transformers = pytest.importorskip("transformers", reason="needs the [oracle] extra")
    _, found = evaluate("perplexity", "--exact")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    total, count = 0.0, 0
    for window in evaluation.make_windows(list(TEXT.encode()), 40, 20, BOS):
        ids = torch.tensor([window.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total, count = total + losses[-window.num_scored :].sum().item(), count + window.num_scored
    assert found["predicted"] == count
    assert found["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)
