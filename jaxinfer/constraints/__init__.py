"""Constrained decoding: grammars compiled by llguidance, and the masks of what may come next."""

from jaxinfer.constraints.compiler import GrammarCompiler
from jaxinfer.constraints.matcher import CompiledGrammar, GrammarFailure, GrammarMatcher
from jaxinfer.constraints.step_masks import StepMasks
from jaxinfer.constraints.token_rules import TokenRules

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarFailure",
    "GrammarMatcher",
    "StepMasks",
    "TokenRules",
]
