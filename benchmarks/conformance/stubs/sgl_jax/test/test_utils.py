"""What sglang-jax's tests start their servers with; here it is one that runs already."""

from __future__ import annotations

import os
import unittest
from types import SimpleNamespace

DEFAULT_MODEL_NAME_FOR_TEST = os.environ.get("CONFORMANCE_MODEL", "model")
DEFAULT_SMALL_MODEL_NAME_FOR_TEST = DEFAULT_MODEL_NAME_FOR_TEST
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 600
DEFAULT_URL_FOR_TEST = os.environ.get("CONFORMANCE_URL", "")
CustomTestCase = unittest.TestCase


def popen_launch_server(*_: object, **__: object) -> SimpleNamespace:
    """Returns what looks like a process."""
    return SimpleNamespace(pid=0)
