"""The cells of pydantic-ai and llama-index."""

from __future__ import annotations

from typing import Any

from cells import cell, city_model


def _agent(at: Any, max_tokens: int = 16, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="EMPTY"))
    return Agent(model, model_settings={"max_tokens": max_tokens}, retries=2, **options)


@cell("pydantic-ai", "run")
async def pydantic_run(at: Any) -> None:
    reply = await _agent(at, instructions="Be brief.").run("Name one colour.")
    assert reply.output
    assert reply.usage.output_tokens > 0


@cell("pydantic-ai", "run_stream")
async def pydantic_stream(at: Any) -> None:
    async with _agent(at).run_stream("Name one colour.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces)


@cell("pydantic-ai", "output by a tool")
async def pydantic_tool(at: Any) -> None:
    reply = await _agent(at, max_tokens=100, output_type=city_model()).run("Name one city.")
    assert reply.output.size in ("s", "l")


@cell("pydantic-ai", "output by json_schema")
async def pydantic_native(at: Any) -> None:
    from pydantic_ai import NativeOutput

    agent = _agent(at, max_tokens=80, output_type=NativeOutput(city_model()))
    assert (await agent.run("Name one city.")).output.size in ("s", "l")


@cell("pydantic-ai", "responses")
async def pydantic_responses(at: Any) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="x"))
    reply = await Agent(model, model_settings={"max_tokens": 16}).run("Name one colour.")
    assert reply.output


def _llama_index(at: Any, *, is_chat: bool) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=at.model, api_base=at.v1, api_key="EMPTY", is_chat_model=is_chat, max_tokens=8,
        max_retries=0, is_function_calling_model=is_chat,
    )  # fmt: skip


@cell("llama-index", "chat")
def llama_index_chat(at: Any) -> None:
    from llama_index.core.llms import ChatMessage

    reply = _llama_index(at, is_chat=True).chat([ChatMessage(content="Name one colour.")])
    assert reply.message.content


@cell("llama-index", "chat stream")
def llama_index_chat_stream(at: Any) -> None:
    from llama_index.core.llms import ChatMessage

    stream = _llama_index(at, is_chat=True).stream_chat([ChatMessage(content="Name a colour.")])
    assert "".join(chunk.delta or "" for chunk in stream)


@cell("llama-index", "completions")
def llama_index_complete(at: Any) -> None:
    assert _llama_index(at, is_chat=False).complete("One two").text


@cell("llama-index", "completions stream")
def llama_index_stream(at: Any) -> None:
    stream = _llama_index(at, is_chat=False).stream_complete("One two")
    assert "".join(chunk.delta or "" for chunk in stream)


@cell("llama-index", "async chat")
async def llama_index_async(at: Any) -> None:
    from llama_index.core.llms import ChatMessage

    reply = await _llama_index(at, is_chat=True).achat([ChatMessage(content="Name one colour.")])
    assert reply.message.content


@cell("llama-index", "tool, required")
def llama_index_tool(at: Any) -> None:
    from llama_index.core.tools import FunctionTool

    def note(city: str, size: str) -> str:
        """Notes a city."""
        return f"{city} {size}"

    model = _llama_index(at, is_chat=True)
    model.max_tokens = 120
    reply = model.chat_with_tools(
        [FunctionTool.from_defaults(note)], user_msg="Note Rome.", tool_required=True
    )
    [call] = model.get_tool_calls_from_response(reply, error_on_no_tool_call=True)[:1]
    assert call.tool_name == "note"


@cell("llama-index", "embeddings")
def llama_index_embeddings(at: Any) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name=at.model, api_base=at.v1, api_key="EMPTY")
    assert len(model.get_text_embedding_batch(["red", "a house"])) == 2
