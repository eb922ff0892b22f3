"""LLM inference compiled by XLA.

Names are imported on first use, so that `import jaxinfer` does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxinfer._kernels_package import check_kernels_package

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig as EngineConfig
    from jaxinfer.grammar import Grammar as Grammar
    from jaxinfer.llm import LLM as LLM
    from jaxinfer.llm import generate as generate
    from jaxinfer.llm import unload as unload
    from jaxinfer.outputs import CompletionOutput as CompletionOutput
    from jaxinfer.outputs import OutputDelta as OutputDelta
    from jaxinfer.outputs import RequestOutput as RequestOutput
    from jaxinfer.outputs import TokenLogprob as TokenLogprob
    from jaxinfer.sampling_params import InvalidParameter as InvalidParameter
    from jaxinfer.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "Grammar": "grammar",
    "InvalidParameter": "sampling_params",
    "LLM": "llm",
    "OutputDelta": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "TokenLogprob": "outputs",
    "generate": "llm",
    "unload": "llm",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    if _HOMES[name] == "llm":
        check_kernels_package()
    value = getattr(importlib.import_module(f"jaxinfer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
