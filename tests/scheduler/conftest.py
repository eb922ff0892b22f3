"""Fixtures over `builders`."""

import pytest
from scheduler import builders


@pytest.fixture(scope="session")
def make_scheduler():
    return builders.make_scheduler


@pytest.fixture(scope="session")
def make_sequence():
    return builders.make_sequence


@pytest.fixture(scope="session")
def pretend_device():
    return builders.PretendDevice
