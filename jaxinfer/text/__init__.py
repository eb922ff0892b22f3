"""Text in and out: tokenizers, chat templates, incremental detokenizing, stop strings.

Imports neither jax nor anything of the engine.
"""

from jaxinfer.text.chat_template import ChatTemplate, TemplateError
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop_strings import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
]
