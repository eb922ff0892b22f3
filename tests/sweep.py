"""Marks of what adds nothing new to what a test always runs: `pytest -m sweep`."""

import pytest

IN_SWEEP = (pytest.mark.sweep, pytest.mark.slow)
