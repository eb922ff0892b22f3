"""The cells of langchain-openai and litellm."""

from __future__ import annotations

import asyncio
from typing import Any

from cells import CITY_SCHEMA, MESSAGES, NAMED, TOOL, cell, check_city


def _langchain(at: Any, **options: Any) -> Any:
    import langchain_openai

    return langchain_openai.ChatOpenAI(
        base_url=at.v1, api_key="EMPTY", model=at.model, max_retries=0,
        **{"max_tokens": 8, **options},
    )  # fmt: skip


@cell("langchain", "invoke")
def langchain_invoke(at: Any) -> None:
    reply = _langchain(at).invoke("Name one colour.")
    assert reply.content
    assert reply.usage_metadata["output_tokens"] > 0


@cell("langchain", "stream with usage")
def langchain_stream(at: Any) -> None:
    chunks = list(_langchain(at, stream_usage=True).stream("Name one colour."))
    assert "".join(chunk.content for chunk in chunks)
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


@cell("langchain", "batch")
def langchain_batch(at: Any) -> None:
    assert len(_langchain(at).batch(["One", "Two", "Three"])) == 3


@cell("langchain", "tools, named")
def langchain_tools(at: Any) -> None:
    model = _langchain(at, max_tokens=100).bind_tools([TOOL], tool_choice="note")
    [call] = model.invoke("Name one city.").tool_calls
    check_city(call["args"])


@cell("langchain", "structured output")
def langchain_structured(at: Any) -> None:
    model = _langchain(at, max_tokens=80).with_structured_output(
        {"title": "city", **CITY_SCHEMA}, method="json_schema", strict=True
    )
    check_city(model.invoke("Name one city."))


@cell("langchain", "structured output by a tool")
def langchain_function_calling(at: Any) -> None:
    model = _langchain(at, max_tokens=100).with_structured_output(
        {"title": "city", **CITY_SCHEMA}, method="function_calling"
    )
    check_city(model.invoke("Name one city."))


@cell("langchain", "OpenAI (completions)")
def langchain_completions(at: Any) -> None:
    import langchain_openai

    model = langchain_openai.OpenAI(
        base_url=at.v1, api_key="EMPTY", model=at.model, max_tokens=6, max_retries=0
    )
    assert model.invoke("One two")


@cell("langchain", "embeddings")
def langchain_embeddings(at: Any) -> None:
    import langchain_openai

    model = langchain_openai.OpenAIEmbeddings(
        base_url=at.v1, api_key="EMPTY", model=at.model, check_embedding_ctx_length=False
    )
    assert len(model.embed_documents(["red", "a house"])) == 2


@cell("langchain", "responses API")
def langchain_responses(at: Any) -> None:
    reply = _langchain(at, use_responses_api=True, max_tokens=16).invoke("Name one colour.")
    assert reply.text


def _litellm(at: Any, provider: str, **options: Any) -> Any:
    import litellm

    return litellm.completion(
        model=f"{provider}/{at.model}", api_base=at.v1, api_key="EMPTY", num_retries=0,
        **{"messages": MESSAGES, "max_tokens": 8, **options},
    )  # fmt: skip


@cell("litellm", "openai/")
def litellm_openai(at: Any) -> None:
    assert _litellm(at, "openai").choices[0].message.content


@cell("litellm", "openai/ stream")
def litellm_openai_stream(at: Any) -> None:
    chunks = list(_litellm(at, "openai", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@cell("litellm", "hosted_vllm/")
def litellm_vllm(at: Any) -> None:
    assert _litellm(at, "hosted_vllm").choices[0].message.content


@cell("litellm", "hosted_vllm/ stream")
def litellm_vllm_stream(at: Any) -> None:
    chunks = list(_litellm(at, "hosted_vllm", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@cell("litellm", "hosted_vllm/ tool, named")
def litellm_tool(at: Any) -> None:
    reply = _litellm(at, "hosted_vllm", tools=[TOOL], tool_choice=NAMED, max_tokens=100)
    check_city(reply.choices[0].message.tool_calls[0].function.arguments)


@cell("litellm", "openai/ json_schema")
def litellm_schema(at: Any) -> None:
    schema = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    reply = _litellm(
        at, "openai", response_format={"type": "json_schema", "json_schema": schema}, max_tokens=80
    )
    check_city(reply.choices[0].message.content)


@cell("litellm", "text-completion-openai/")
def litellm_text(at: Any) -> None:
    import litellm

    reply = litellm.text_completion(
        model=f"text-completion-openai/{at.model}", prompt="One two", api_base=at.v1,
        api_key="EMPTY", max_tokens=6,
    )  # fmt: skip
    assert reply.choices[0].text


@cell("litellm", "embedding")
def litellm_embedding(at: Any) -> None:
    import litellm

    reply = litellm.embedding(
        model=f"openai/{at.model}", input=["red", "a house"], api_base=at.v1, api_key="EMPTY",
        encoding_format="float",
    )  # fmt: skip
    assert len(reply.data) == 2


@cell("litellm", "context window error")
def litellm_context(at: Any) -> None:
    import litellm

    try:
        _litellm(at, "openai", messages=[{"role": "user", "content": "word " * 20_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt of 20,000 words was accepted")


@cell("litellm", "async")
async def litellm_async(at: Any) -> None:
    import litellm

    replies = await asyncio.gather(
        *(
            litellm.acompletion(
                model=f"openai/{at.model}", api_base=at.v1, api_key="EMPTY", messages=MESSAGES,
                max_tokens=6,
            )
            for _ in range(4)
        )
    )  # fmt: skip
    assert all(reply.choices[0].message.content for reply in replies)
