"""POST /v1/embeddings: the normalized hidden state of each text's last token.

That is how vLLM and llama.cpp embed with a causal model (last-token pooling): the state after the
final norm, scaled to length 1.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from aiohttp import web

from jaxinfer.config import ServerConfig
from jaxinfer.embedding import normalized
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import EMBEDDING, EngineRequest
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.server.answers import WholeAnswer
from jaxinfer.server.errors import invalid, missing, unsupported
from jaxinfer.server.fields import (
    Field,
    boolean,
    described,
    ignored,
    integer,
    one_of,
    read_object,
    refused,
    string,
)
from jaxinfer.server.parameters import INT64_MAX, INT64_MIN
from jaxinfer.server.prompts import (
    TRUNCATION,
    Prompt,
    Truncation,
    any_prompts,
    read_prompts,
    read_truncation,
)
from jaxinfer.server.replies import reply
from jaxinfer.server.routing import read_call
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.sse import dumps
from jaxinfer.server.state import CONFIG, REQUEST_ID
from jaxinfer.server.threads import in_thread

MAX_INPUTS = 2048
_MOST_AT_ONCE = 256


@described({"not": {}})
def _no_dimensions(value: Any, path: str) -> None:
    integer(1)(value, path)
    message = f"{path} is not supported: this model's embeddings cannot be cut; leave it out"
    raise unsupported(path, message)


EMBEDDINGS: Mapping[str, Field] = {
    "model": Field(string()),
    "input": Field(any_prompts),
    "encoding_format": Field(one_of("float", "base64")),
    "dimensions": Field(_no_dimensions, is_honoured=False),
    "user": ignored(string()),
    "add_special_tokens": Field(boolean),
    "priority": Field(integer(INT64_MIN, INT64_MAX)),
    "normalize": Field(boolean),
    **TRUNCATION,
    # Other servers' choices, of which one is made here.
    "pooling": refused("last", because="must be 'last': causal models have no other embedding"),
    "embd_normalize": refused(2, because="must be 2, the Euclidean norm"),
    "embed_dtype": refused("float32", because="must be 'float32'"),
    "endianness": refused("little", "native", because="must be 'little'"),
}


@dataclass(frozen=True)
class EmbeddingsRequest:
    """A validated embeddings request.

    Attributes:
      model: the name it was sent under; None if it named none.
      inputs: texts or token ids.
      encoding: numbers, or the bytes of little-endian float32 in base64.
      normalize: scale to length 1.
      add_special_tokens: whether tokenizing adds them.
      priority: smaller is scheduled earlier.
      truncation: how longer inputs are cut; None refuses them.
    """

    model: str | None
    inputs: tuple[Prompt, ...]
    encoding: Literal["float", "base64"] = "float"
    normalize: bool = True
    add_special_tokens: bool = True
    priority: int = 0
    truncation: Truncation | None = None


def parse_embeddings(
    body: Mapping[str, Any], *, vocab_size: int, config: ServerConfig
) -> EmbeddingsRequest:
    """Returns the request in a JSON body.

    Raises:
      ApiError: 400; a parameter is missing, does not fit, or is not honoured.
    """
    values = read_object(body, EMBEDDINGS, strict=config.strict_params)
    if "input" not in values:
        raise missing("input")
    inputs = read_prompts(values["input"], "input", vocab_size)
    if len(inputs) > MAX_INPUTS:
        message = f"input takes at most {MAX_INPUTS} texts, got {len(inputs)}"
        raise invalid("input", message, "array_above_max_length")
    return EmbeddingsRequest(
        model=values.get("model"),
        inputs=inputs,
        encoding=values.get("encoding_format", "float"),
        normalize=values.get("normalize", True),
        add_special_tokens=values.get("add_special_tokens", True),
        priority=values.get("priority", 0),
        truncation=read_truncation(values),
    )


class EmbeddingAnswer(WholeAnswer):
    """OpenAI's list of embeddings."""

    is_large = True

    def __init__(
        self, model: str, call: EmbeddingsRequest, requests: Sequence[EngineRequest], most: int
    ) -> None:
        super().__init__(requests)
        self.most_at_once = most
        self._model = model
        self._call = call

    def text(self) -> str:
        """Returns the JSON of the body."""
        usage = {
            "prompt_tokens": self.usage.prompt_tokens,
            "total_tokens": self.usage.prompt_tokens,
        }
        # One by one: a call that writes all numbers would hold the event loop up.
        items = ",".join(
            dumps({"object": "embedding", "index": index, "embedding": self._encoded(output)})
            for index, output in enumerate(self.outputs)
        )
        rest = dumps({"model": self._model, "usage": usage})
        return f'{{"object":"list","data":[{items}],{rest[1:]}'

    def _encoded(self, output: RequestOutput) -> list[float] | str:
        assert output.hidden is not None, "the engine reports it of a request that has ended well"
        vector = normalized(output.hidden) if self._call.normalize else output.hidden
        if self._call.encoding == "float":
            return vector.tolist()
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


async def embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings: vectors that stand for texts."""
    config = request.app[CONFIG]

    def parse(body: Mapping[str, Any], model: ServedModel) -> EmbeddingsRequest:
        return parse_embeddings(body, vocab_size=model.vocab_size, config=config)

    model, call = await read_call(request, parse)
    # Ids that are too long are so at any time; what is a full queue's is tokenizing.
    has_text = any(isinstance(text, str) for text in call.inputs)
    with model.preparing() if has_text else nullcontext():
        requests = await in_thread(request, lambda: _admit(request[REQUEST_ID], model, call))
    most = max(1, min(_MOST_AT_ONCE, model.engine.config.max_queued_requests // 2))
    return await reply(request, EmbeddingAnswer(call.model or model.name, call, requests, most))


def _admit(request_id: str, model: ServedModel, call: EmbeddingsRequest) -> list[EngineRequest]:
    """Returns the engine requests; from here on nothing is wrong with what the client sent."""
    engine, requests = model.engine, []
    name, now = f"{request_id}-{secrets.token_hex(4)}", time.monotonic()
    for number, text in enumerate(call.inputs):
        token_ids: Sequence[int]
        if isinstance(text, str):
            token_ids = engine.tokenizer.encode(text, add_special_tokens=call.add_special_tokens)
        else:
            token_ids = text
        if call.truncation is not None:
            token_ids = call.truncation.cut(token_ids, engine.max_model_len)
        admitted = EngineRequest(
            request_id=f"{name}-{number}",
            prompt_token_ids=tuple(token_ids),
            params=EMBEDDING,
            priority=call.priority,
            arrival_time=now,
            embeds=True,
        )
        try:
            engine.check(admitted)
        except InvalidParameter as error:
            where = f"input[{number}]: " if len(call.inputs) > 1 else ""
            raise invalid("input", f"{where}{error}", error.code) from None
        requests.append(admitted)
    return requests
