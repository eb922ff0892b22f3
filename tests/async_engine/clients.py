"""Requests of clients, and how tests wait for what becomes of them."""

import time

from jaxinfer.outputs import RequestOutput
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def request(request_id="r", prompt=(1, 2, 3), max_tokens=5, **settings):
    return EngineRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **GREEDY, **settings)
    )


async def fold(engine, request):
    output = RequestOutput.empty(
        request.request_id, None, request.prompt_token_ids, request.params.n
    )
    async for delta in engine.generate(request):
        output.extend(delta)
    return [completion.token_ids for completion in output.outputs]


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
