"""Fixtures over `builders`."""

import jax
import numpy as np
import pytest
from engine.builders import compiled_runner, new_engine, run_requests, tiny_model
from flax import nnx


@pytest.fixture(scope="session")
def make_engine():
    """Returns a new engine around the shared runner of a model, without a prefix cache.

    They share the device's pages, too: what one has cached is void once another has run.
    """

    def make(model_type="llama", tensor_parallel=1, **limits):
        runner = compiled_runner(model_type, tensor_parallel)
        return new_engine(runner, tiny_model(model_type, tensor_parallel)[1], **limits)

    return make


@pytest.fixture(scope="session")
def run():
    return run_requests


@pytest.fixture(scope="session")
def prompt():
    """Returns `length` byte ids that depend on the seed."""

    def make(length, seed=0):
        return np.random.default_rng(seed).integers(0, 256, length).tolist()

    return make


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def depth(request):
    """Pipeline depth."""
    return request.param


@pytest.fixture
def poisoned(monkeypatch):
    """The token whose embedding is NaN in the shared runner during a test."""
    token = 200
    runner = compiled_runner()
    state = nnx.split(tiny_model()[0])[1]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    (index,) = [index for index, path in enumerate(paths) if "embed" in path]
    params = list(runner._params)
    broken = np.asarray(params[index]).copy()
    broken[token] = np.nan
    params[index] = jax.device_put(broken, params[index].sharding)
    monkeypatch.setattr(runner, "_params", tuple(params))
    return token
