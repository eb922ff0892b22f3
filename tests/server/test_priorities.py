"""`priority` in a body: what reaches the engine, and what is refused."""

import pytest
from server.fake_engine import chat

PATHS = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3},
}


@pytest.mark.parametrize(("path", "body"), PATHS.items())
async def test_each_prompt_is_scheduled_with_the_priority_of_its_request(
    server, engine, path, body
):
    for fields, expected in (({}, 0), ({"priority": -3}, -3), ({"priority": 7}, 7)):
        engine.requests.clear()
        assert (await server.post(path, {**body, **fields}))[0] == 200
        assert {request.priority for request in engine.requests} == {expected}


@pytest.mark.parametrize(("path", "body"), PATHS.items())
@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**63])
async def test_what_is_no_priority_is_refused(server, engine, path, body, priority):
    status, answer, _ = await server.post(path, {**body, "priority": priority})
    assert status == 400
    assert answer["error"]["param"] == "priority"
    assert not engine.requests
