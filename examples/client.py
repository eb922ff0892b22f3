"""OpenAI's Python client against a running server: models, chat, streaming, an error.

python serve.py &
python examples/client.py [--base-url http://127.0.0.1:8080/v1] [--max-tokens 48]
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    try:
        import openai
    except ImportError:
        print("this example needs OpenAI's client: pip install openai", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(description="Talk to a running server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    client = openai.OpenAI(
        base_url=args.base_url, api_key=os.environ.get("JAXINFER_API_KEY", "none")
    )
    model = client.models.list().data[0].id
    print(f"model: {model}")

    messages = [{"role": "user", "content": "Name three colours."}]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=args.max_tokens
    )
    print(f"chat: {answer.choices[0].message.content}")
    print(f"usage: {answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens")

    print("stream: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=args.max_tokens, stream=True
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    try:
        client.chat.completions.create(model=model, messages=messages, temperature=9)
    except openai.BadRequestError as error:
        print(f"error: {error.body['message']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
