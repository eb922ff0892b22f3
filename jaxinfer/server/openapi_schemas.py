"""JSON Schemas that no parameter table holds: replies, and the parameters read by hand.

Replies may have more than is named here; what is required is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.sampling_params import MAX_STOP_STRINGS

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LOGPROB: Schema = {"type": "number", "maximum": 0}
_TEXT: Schema = {"type": "string", "minLength": 1}
_OBJECT: Schema = {"type": "object"}


def _object(*optional: str, **properties: Schema) -> Schema:
    """Returns an object whose properties are required, apart from those in `optional`."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _one_of_types(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    """Returns a reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Mapping[str, Any]) -> Schema:
    """Returns a schema that also takes null, which means absent."""
    kind, choices = schema.get("type"), schema.get("enum")
    if not schema:
        return {}
    if schema == {"not": {}}:
        return {"type": "null"}
    if choices is not None:
        kinds = {} if kind is None else {"type": [kind, "null"]}
        return {**schema, **kinds, "enum": [*choices, None]}
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"]}
    return _one_of_types(dict(schema), {"type": "null"})


_FUNCTION_CALL = _object(name=_STRING, arguments=_STRING)
_TOOL_CALL = _object("id", "type", id=_STRING, type=_STRING, function=_FUNCTION_CALL)
_PART: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "refusal"]}, "text": _STRING, "refusal": _STRING},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["developer", "system", "user", "assistant", "tool", "function"]},
        "content": nullable(_one_of_types(_STRING, _array(_PART, minItems=1))),
        "name": nullable(_STRING),
        "tool_call_id": nullable(_STRING),
        "reasoning_content": nullable(_STRING),
        "tool_calls": nullable(_array(_TOOL_CALL)),
    },
}

BY_HAND: Mapping[str, Schema] = {
    "messages": _array(_MESSAGE, minItems=1),
    "stop": _one_of_types(_TEXT, _array(_TEXT, maxItems=MAX_STOP_STRINGS)),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "modalities": {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1},
}
"""Parameters whose readers look at a whole value at once."""

_SPEED: Schema = {"type": "number", "minimum": 0}
_USAGE = _object(
    "completion_tokens_details",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
    completion_tokens_details=_object(reasoning_tokens=_COUNT),
    avg_tok_per_sec=_SPEED,
    avg_prompt_tok_per_sec=_SPEED,
    avg_compl_tok_per_sec=_SPEED,
    total_time_sec=_SPEED,
    total_prompt_time_sec=_SPEED,
    total_completion_time_sec=_SPEED,
)
_FINISH_REASON: Schema = {
    "enum": ["stop", "length", "tool_calls", "function_call", "content_filter"]
}
_CHAT_TOP = _object(token=_STRING, logprob=_LOGPROB, bytes=nullable(_array(_COUNT)))
_CHAT_LOGPROBS = _object(
    "refusal",
    content=nullable(
        _array(
            _object(
                token=_STRING,
                logprob=_LOGPROB,
                bytes=nullable(_array(_COUNT)),
                top_logprobs=_array(_CHAT_TOP),
            )
        )
    ),
    refusal=nullable(_array(_OBJECT)),
)
_COMPLETION_LOGPROBS = _object(
    tokens=_array(_STRING),
    token_logprobs=_array(nullable(_LOGPROB)),
    top_logprobs=_array(nullable({"type": "object", "additionalProperties": _LOGPROB})),
    text_offset=_array(_COUNT),
)
_IDENTITY: dict[str, Schema] = {
    "id": _STRING,
    "created": _INTEGER,
    "model": _STRING,
    "system_fingerprint": _STRING,
}
_CHAT_CHOICE = _object(
    "stop_reason",
    index=_COUNT,
    message=_object(
        "tool_calls",
        "function_call",
        "reasoning_content",
        "reasoning",
        role={"const": "assistant"},
        content=nullable(_STRING),
        refusal=nullable(_STRING),
        tool_calls=nullable(_array(_TOOL_CALL)),
        function_call=nullable(_FUNCTION_CALL),
        reasoning_content=nullable(_STRING),
        reasoning=nullable(_STRING),
    ),
    logprobs=nullable(_CHAT_LOGPROBS),
    finish_reason=_FINISH_REASON,
    stop_reason=nullable(_one_of_types(_STRING, _INTEGER)),
)
_COMPLETION_CHOICE = _object(
    "stop_reason",
    index=_COUNT,
    text=_STRING,
    logprobs=nullable(_COMPLETION_LOGPROBS),
    finish_reason=_FINISH_REASON,
    stop_reason=nullable(_one_of_types(_STRING, _INTEGER)),
)
_MODEL = _object(
    "root",
    "parent",
    "max_model_len",
    id=_STRING,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_STRING,
    root=_STRING,
    parent=nullable(_STRING),
    max_model_len=nullable(_COUNT),
    status={"enum": ["loading", "loaded", "unloading", "unloaded", "failed"]},
)
_EMBEDDING = _object(
    object={"const": "embedding"},
    index=_COUNT,
    embedding=_one_of_types(_array(_NUMBER), _STRING),
)
_RESPONSE_USAGE = _object(
    input_tokens=_COUNT,
    input_tokens_details=_object(cached_tokens=_COUNT),
    output_tokens=_COUNT,
    output_tokens_details=_object(reasoning_tokens=_COUNT),
    total_tokens=_COUNT,
)

SCHEMAS: Mapping[str, Schema] = {
    "ErrorResponse": _object(
        error=_object(
            message=_STRING, type=_STRING, param=nullable(_STRING), code=nullable(_STRING)
        )
    ),
    "Usage": _USAGE,
    "ChatCompletion": _object(
        **_IDENTITY,
        object={"const": "chat.completion"},
        choices=_array(_CHAT_CHOICE, minItems=1),
        usage=ref("Usage"),
    ),
    "Completion": _object(
        **_IDENTITY,
        object={"const": "text_completion"},
        choices=_array(_COMPLETION_CHOICE, minItems=1),
        usage=ref("Usage"),
    ),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        model=_STRING,
        status={"enum": ["completed", "incomplete", "failed", "in_progress"]},
        incomplete_details=nullable(_object(reason=_STRING)),
        error=nullable(_object(code=_STRING, message=_STRING)),
        output=_array(_object("id", type=_STRING, id=_STRING)),
        usage=nullable(_RESPONSE_USAGE),
    ),
    "Embeddings": _object(
        object={"const": "list"},
        data=_array(_EMBEDDING),
        model=_STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_array(ref("Model"))),
    "Tokens": _object(
        "token_strs",
        tokens=_array(
            _one_of_types(_COUNT, _object(id=_COUNT, piece=_one_of_types(_STRING, _array(_COUNT))))
        ),
        count=_COUNT,
        max_model_len=_COUNT,
        token_strs=_array(_STRING),
    ),
    "Text": _object(prompt=_STRING, content=_STRING),
    "TokenizerInfo": _object(chat_template=nullable(_one_of_types(_STRING, _OBJECT))),
    "Status": _object(status=_STRING),
    "Version": _object(version=_STRING),
    "Object": _OBJECT,
}
"""Replies, by name."""
