"""Adapters that vLLM's tests would download, and their tokenizers: none, and that of the model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import tokenizers as vllm_tokenizers
from vllm.transformers_utils import repo_utils


def _tokenizer(*_: Any, **__: Any) -> Any:
    return AutoTokenizer.from_pretrained(os.environ["CONFORMANCE_TOKENIZER"])


# Before the tests import these names.
vllm_tokenizers.get_tokenizer = _tokenizer
repo_utils.hf_api = lambda: SimpleNamespace(snapshot_download=lambda **_: "none")


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    """No adapter."""
    return "none"
