"""A fake engine that says what a test tells it to, and a client of the application before it."""

import asyncio
import json
from array import array

from jaxinfer.async_engine import AsyncEngine, EngineDeadError, EngineStats, QueueFullError
from jaxinfer.config import EngineConfig
from jaxinfer.outputs import OutputDelta, TokenLogprob
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate, Detokenizer, StopMatcher

EOS = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakeAsyncEngine(AsyncEngine):
    """Speaks AsyncEngine's contract; every prompt is answered with the bytes of `text`.

    Attributes a test may set: `text`; `gate`, which holds every token back while clear; `fault`,
    an exception raised or a finish reason sent after `fault_after` tokens; `refusal`, what
    `check` raises; `load_error`; `num_cached`, tokens of each prompt found in the prefix cache;
    `times`, what every completion takes; `most_running`, beyond which requests are refused. Of
    prompts to embed it reports their first two ids.
    """

    # These are properties of the real engine, which reads them from the loaded model.
    model_name = tokenizer = chat_template = default_params = max_model_len = vocab_size = None
    settings = None

    def __init__(self, max_model_len=256, name="tiny"):
        # A model that is nowhere: nothing shall be fetched to see how large it is.
        super().__init__(EngineConfig(model="no-such-model"))
        self.tokenizer = byte_tokenizer(TEMPLATE)
        self.chat_template = ChatTemplate.from_tokenizer(self.tokenizer)
        self.model_name = name
        self.max_model_len = max_model_len
        self.vocab_size = 320
        self.default_params = {}
        self.settings = {"max_num_seqs": "7", "prefix_cache": "true"}
        self.text = "hello"
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault = None
        self.fault_after = 0
        self.refusal = None
        self.load_error = None
        self.loaded_event = asyncio.Event()
        self.loaded_event.set()
        self.requests = []
        self.running = {}
        self.aborted = []
        self.finished = {}
        self.totals = [0, 0]
        self.num_cached = 0
        self.times = None
        self.num_clears = 0
        self.most_running = None

    def check_room(self, num_sequences=1, num_prompt_tokens=0):
        if self.most_running is not None and len(self.running) + num_sequences > self.most_running:
            raise QueueFullError(f"{len(self.running)} are running")

    def clear_prefix_cache(self):
        self.num_clears += 1

    def check(self, request):
        if self.refusal is not None:
            raise self.refusal

    async def start(self):
        await self.loaded_event.wait()
        if self.load_error is not None:
            self.state = "dead"
            raise self.load_error
        self.state = "ready"

    async def shutdown(self, timeout=0.0):
        self.state = "dead"

    def free(self):
        """Nothing: collecting garbage would find what other tests left."""

    def stats(self):
        if self.state == "loading":
            raise EngineDeadError("loading")
        used = len(self.running)
        return EngineStats(
            *(used, 0, 100, 100 - used, 0, *self.totals, 0, self.totals[1]),
            finished=dict(self.finished),
            prefix_cache_queries=self.totals[0],
            prefix_cache_hits=self.num_cached * len(self.requests),
        )

    async def generate(self, request):
        if isinstance(self.fault, QueueFullError):
            raise self.fault
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}")
        self.check_room()
        self.requests.append(request)
        self.running[request.request_id] = request
        self.totals[0] += request.params.n * len(request.prompt_token_ids)
        open_completions = set(range(request.params.n))
        try:
            for delta in self._deltas(request):
                await self.gate.wait()
                await asyncio.sleep(0)
                self.totals[1] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    open_completions.discard(delta.index)
                    reason = delta.finish_reason
                    self.finished[reason] = self.finished.get(reason, 0) + 1
                yield delta
        finally:
            del self.running[request.request_id]
            if open_completions:
                self.aborted.append(request.request_id)

    def _deltas(self, request):
        params = request.params
        rows = [_Row(self, request, index) for index in range(params.n)]
        if params.max_tokens == 0:
            yield from (row.scored() for row in rows)
            return
        step = 0
        while rows:
            if self.fault is not None and step == self.fault_after:
                if isinstance(self.fault, Exception):
                    raise self.fault
                yield OutputDelta(request.request_id, 0, finish_reason=self.fault, error="boom")
                return
            for row in list(rows):
                delta = row.step()
                if delta.finish_reason is not None:
                    rows.remove(row)
                yield delta
            step += 1


class _Row:
    def __init__(self, engine, request, index):
        self.request, self.index, self.params = request, index, request.params
        self.num_cached = 0 if index else engine.num_cached
        self.times = engine.times
        self.tokens = iter([*engine.text.encode(), EOS])
        if self.params.ignore_eos:
            self.tokens = iter(engine.text.encode() * 1000)
        self.detokenizer = Detokenizer(engine.tokenizer, self.params.skip_special_tokens)
        self.stops = StopMatcher(self.params.stop, self.params.include_stop_str_in_output)
        self.count = 0

    def _logprob(self, token_id, k):
        if k is None:
            return None
        top = [(token_id, -0.5), *((other, -1.0 - other) for other in range(1, k + 1))]
        return TokenLogprob(token_id, -0.5, tuple(top[:k]))

    def _prompt_logprobs(self):
        k = self.params.prompt_logprobs
        if k is None or self.index or self.count > 1:
            return None
        scored = (self._logprob(token_id, k) for token_id in self.request.prompt_token_ids[1:])
        return (None, *scored)

    def scored(self):
        return OutputDelta(
            self.request.request_id,
            self.index,
            finish_reason="length",
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=self.num_cached,
            times=self.times,
            hidden=array("f", self.request.prompt_token_ids[:2]) if self.request.embeds else None,
        )

    def step(self):
        token_id = next(self.tokens)
        self.count += 1
        finish = stop_reason = None
        text = ""
        if token_id == EOS or token_id in self.params.stop_token_ids:
            finish, stop_reason = "stop", None if token_id == EOS else token_id
        else:
            text, stop_reason = self.stops.push(self.detokenizer.push(token_id))
            finish = None if stop_reason is None else "stop"
        if finish is None and self.count >= self.params.max_tokens:
            finish = "length"
        if finish is not None and not isinstance(stop_reason, str):
            text += self.stops.push(self.detokenizer.flush())[0] + self.stops.flush()
        logprob = self._logprob(token_id, self.params.logprobs)
        return OutputDelta(
            self.request.request_id,
            self.index,
            text=text,
            token_ids=(token_id,),
            logprobs=None if logprob is None else (logprob,),
            finish_reason=finish,
            stop_reason=stop_reason,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=self.num_cached,
            times=None if finish is None else self.times,
        )


class Server:
    """A running application, and the few ways tests talk to it."""

    def __init__(self, app, port, session):
        self.app, self.port, self.session = app, port, session
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path, body, **options):
        """Returns (status, parsed JSON, headers)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path, **options):
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path, body):
        """Returns the raw events of a stream, each without its blank line."""
        body = {**body, "stream": True}
        async with self.session.post(self.url + path, json=body) as response:
            raw = await response.read()
        assert response.status == 200, raw
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert raw.endswith(b"\n\n")
        return raw[:-2].split(b"\n\n")

    async def chunks(self, path, body):
        """Returns the parsed chunks of a stream that ended well."""
        *events, last = await self.events(path, body)
        assert last == b"data: [DONE]"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    async def raw(self, body, path="/v1/chat/completions", version="1.1", extra=""):
        """Opens a connection, sends one request on it, returns (reader, writer)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


def chat(text="hi", **parameters):
    """Returns the body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], **parameters}


async def until(condition, timeout_s=20.0):
    """Waits until `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
