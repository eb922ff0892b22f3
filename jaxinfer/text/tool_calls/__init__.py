"""Calls of functions and reasoning in a model's answer: one registry of formats, one parser.

Imports neither jax nor anything of the engine or the server.
"""

from jaxinfer.text.tool_calls.events import Call, CallDelta, Event, Message, Reasoning, Text, fold
from jaxinfer.text.tool_calls.formats import FORMATS, HERMES, CallFormat, format_of
from jaxinfer.text.tool_calls.markers import Markers
from jaxinfer.text.tool_calls.parser import AnswerParser, AnswerSyntax, ReasoningTags

__all__ = [
    "AnswerParser",
    "AnswerSyntax",
    "Call",
    "CallDelta",
    "CallFormat",
    "Event",
    "FORMATS",
    "HERMES",
    "Markers",
    "Message",
    "Reasoning",
    "ReasoningTags",
    "Text",
    "fold",
    "format_of",
]
