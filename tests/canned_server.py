"""A server whose answers are canned, for clients that send load."""

import asyncio
import contextlib
import json

from aiohttp import web


class CannedServer:
    """Streams as many tokens as are asked for; a prompt's first id says how it fails.

    Attributes:
      bodies: what was asked for.
      first_s, gap_s: before the first token, and between two.
      hold: how many requests must be there before any is answered.
      num_open, most_open: requests being answered, now and at most.
    """

    def __init__(self):
        self.url = ""
        self.bodies = []
        self.first_s = self.gap_s = 0.0
        self.hold = 0
        self.num_open = self.most_open = 0
        self._all_there = asyncio.Event()

    async def models(self, request):
        return web.json_response({"data": [{"id": "fake"}]})

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if len(self.bodies) >= self.hold:
            self._all_there.set()
        await self._all_there.wait()
        try:
            return await self._answer(request, body)
        finally:
            self.num_open -= 1

    async def _answer(self, request, body):
        failure = {1: "429", 2: "event", 3: "cut", 4: "not json", 5: "hang", 6: "drop", 7: "list"}
        failure = failure.get(body["prompt"][0])
        if failure == "429":
            error = {"error": {"message": "the queue is full", "code": "queue_full"}}
            return web.json_response(error, status=429)
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(text):
            await response.write(f"data: {text}\n\n".encode())

        def chunk(text, usage=None):
            choices = [] if usage else [{"index": 0, "text": text}]
            return json.dumps({"choices": choices, "usage": usage})

        await response.write(b": comment\n\n")
        await send(chunk(""))  # no token yet
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s if index else self.first_s)
            await send(chunk("ü" * 10))
            if failure == "event":
                await send(json.dumps({"error": {"message": "it broke"}}))
            elif failure == "cut":
                return response
            elif failure == "not json":
                await send("{")
            elif failure == "list":
                await send("[1]")
            elif failure == "hang":
                await asyncio.sleep(60)
            elif failure == "drop":
                request.transport.abort()
                return response
        details = {"cached_tokens": 3}
        usage = {"prompt_tokens": 11, "prompt_tokens_details": details}
        if body["prompt"][0] != 8:
            await send(chunk("", usage | {"completion_tokens": body["max_tokens"]}))
        await send("[DONE]")
        return response

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
