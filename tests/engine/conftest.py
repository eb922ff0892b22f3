"""Fixtures over `builders`."""

import numpy as np
import pytest
from engine.builders import compiled_runner, new_engine, run_requests, tiny_model


@pytest.fixture(scope="session")
def make_engine():
    """Returns a new engine around the shared runner of a model."""

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
