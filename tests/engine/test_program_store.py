"""Programs that an earlier start compiled are found again, and no others."""

import dataclasses
import os
import time

import jax
import numpy as np
import pytest
from checkpoint.tiny_directory import pickle_that_makes
from tiny_engine import EOS, tiny_model

from jaxinfer import compilation_cache
from jaxinfer.config import EngineConfig
from jaxinfer.request import EngineRequest
from jaxinfer.runner import program_store
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import assemble_engine
from jaxinfer.testing import byte_tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    before = jax.config.values["jax_compilation_cache_dir"]
    directory = tmp_path_factory.mktemp("cache")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    yield directory
    jax.config.update("jax_compilation_cache_dir", before)


def start(**changes):
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 4, "num_pages": 32}
    model, groups = tiny_model()
    return assemble_engine(
        EngineConfig(exact=True, **(config | changes)),
        model,
        groups,
        byte_tokenizer(),
        frozenset({EOS}),
    )


def answer(engine):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=9, ignore_eos=True, logprobs=2)
    engine.add(EngineRequest("r", tuple(range(20)), params))
    found = []
    while engine.has_work:
        found += [(delta.token_ids, delta.logprobs) for delta in engine.step()]
    assert engine.stats().num_compilations_after_warmup == 0
    return found


def files(cache):
    return sorted((cache / "programs").iterdir())


@pytest.fixture(scope="module")
def first(cache):
    """What a first start answers; it leaves its programs behind."""
    found = answer(start())
    assert files(cache)
    return found


def forbid_tracing(monkeypatch):
    def lower(*_):
        raise AssertionError("a program that is there was traced")

    monkeypatch.setattr(ModelRunner, "lower", lower)


def test_a_second_start_traces_nothing_and_answers_the_same(cache, first, monkeypatch):
    forbid_tracing(monkeypatch)
    engine = start()
    assert answer(engine) == first
    assert set(engine.runner.memory_analysis()) == {
        f"{path.name.split('-')[1]}[{path.name.split('-')[2].removesuffix('.program')}]"
        for path in files(cache)
    }
    assert "fusion" in engine.runner.hlo("decode", 2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "of another jax"])
def test_what_is_damaged_is_compiled_again(cache, first, damage, monkeypatch, caplog):
    path = files(cache)[0]
    good = path.read_bytes()
    if damage == "cut":
        path.write_bytes(good[:-1])
    elif damage == "flipped":
        path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    else:
        data = b"a pickle of nothing"
        path.write_bytes(program_store._checksum(data) + b"\n" + data)
    lowered = []
    lower = ModelRunner.lower
    monkeypatch.setattr(ModelRunner, "lower", lambda *args: lowered.append(args) or lower(*args))
    assert answer(start()) == first
    assert len(lowered) == 1
    assert str(path) in caplog.text
    forbid_tracing(monkeypatch)
    assert answer(start()) == first


def test_what_others_could_have_written_is_compiled_again(cache, first, tmp_path, caplog):
    path, trace = files(cache)[0], tmp_path / "trace"
    data = pickle_that_makes(trace)
    path.write_bytes(program_store._checksum(data) + b"\n" + data)
    path.chmod(0o666)
    assert answer(start()) == first
    assert f"{path} could be anybody's" in caplog.text
    assert not trace.exists()


@pytest.mark.parametrize(
    ("uid", "mode", "is_own"),
    [(0, 0o644, True), (7, 0o600, True), (7, 0o602, False), (8, 0o600, False)],
)
def test_whose_a_file_is(uid, mode, is_own, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 7)
    assert program_store._is_own(os.stat_result((mode, 0, 0, 1, uid, *[0] * 5))) == is_own


def test_a_folder_that_cannot_be_written_costs_only_time(first, monkeypatch, caplog):
    def write(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(program_store.ProgramStore, "_write", write)
    monkeypatch.setattr(program_store.ProgramStore, "load", lambda *_: None)
    assert answer(start()) == first
    assert "the disk is full" in caplog.text


@pytest.fixture(scope="module")
def runner(first):
    return start().runner


def digest(runner):
    return compilation_cache.program_store(runner)._digest


def test_whatever_decides_programs_decides_which_are_taken(runner, monkeypatch):
    digests = {digest(runner)}
    assert digests == {digest(runner)}

    def differs():
        new = digest(runner)
        assert new not in digests
        digests.add(new)

    for name, value in {
        "config": dataclasses.replace(runner.config, num_pages=99),
        "vocab_size": 200,
        "_model_parts": (*runner._model_parts[:2], "another context"),
        "_expected": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float16), runner._expected
        ),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, value)
            differs()
    for name, value in {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "PJRT_NPROC": "7"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            differs()
    with monkeypatch.context() as patch:
        patch.setattr(compilation_cache, "_sources", lambda: "one line of code changed")
        differs()
    with monkeypatch.context() as patch:
        patch.setattr(compilation_cache, "version", lambda _: "0.13")
        differs()
    with jax.default_matmul_precision("bfloat16"):
        differs()


def test_where_there_is_none(runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model_parts", (object(),))
        assert compilation_cache.program_store(runner) is None, "its name does not last"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "platform", "tpu")
        assert compilation_cache.program_store(runner) is None
    before = jax.config.values["jax_compilation_cache_dir"]
    for directory in (None, "gs://bucket/cache"):
        jax.config.update("jax_compilation_cache_dir", directory)
        try:
            assert compilation_cache.program_store(runner) is None
        finally:
            jax.config.update("jax_compilation_cache_dir", before)


def test_what_nothing_used_for_long_is_removed(cache, first):
    old, kept = (cache / "programs" / f"{name}-decode-2.program" for name in ("old", "kept"))
    for path in (old, kept):
        path.write_bytes(b"")
    long_ago = time.time() - program_store.KEPT_S - 60
    os.utime(old, (long_ago, long_ago))
    start(num_pages=40)
    assert not old.exists()
    assert kept.exists()
