"""Which web pages may ask: none by default, and never with credentials."""

import pytest
from server.fake_engine import chat

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def cors_headers(headers):
    return {name for name in headers if name.lower().startswith("access-control-")}


async def ask(server, method, path, origin, **headers):
    url = server.url + path
    headers = {"Origin": origin, **headers}
    async with server.session.request(method, url, headers=headers) as response:
        return response.status, response.headers, await response.text()


async def test_off_by_default(server):
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models"), ("GET", "/health")):
        status, headers, _ = await ask(server, method, path, PAGE, **PREFLIGHT)
        assert status == (405 if method == "OPTIONS" else 200)
        assert not cors_headers(headers)


class TestAllowedOrigins:
    @pytest.fixture
    async def server(self, start):
        return await start(allowed_origins=(PAGE, "http://localhost:3000"), api_key=("k",))

    @pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
    async def test_a_preflight_needs_no_key(self, server, origin):
        status, headers, body = await ask(server, "OPTIONS", CHAT, origin, **PREFLIGHT)
        assert (status, body) == (204, "")
        assert headers["Access-Control-Allow-Origin"] == origin
        assert "POST" in headers["Access-Control-Allow-Methods"]
        assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        assert "Origin" in headers["Vary"]
        assert "Access-Control-Allow-Credentials" not in headers

    async def test_every_answer_may_be_read(self, server):
        for path, status in (("/v1/models", 401), ("/nowhere", 401), ("/health", 200)):
            got, headers, _ = await ask(server, "GET", path, PAGE)
            assert (got, headers["Access-Control-Allow-Origin"]) == (status, PAGE)
            assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        headers = {"Origin": PAGE, "X-Api-Key": "k", "Sec-Fetch-Site": "cross-site"}
        for stream in (False, True):
            async with server.session.post(
                server.url + CHAT, json=chat(stream=stream), headers=headers
            ) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE

    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", PAGE + ".evil.example", PAGE + ":8443", "*"]
    )
    async def test_other_pages_are_not_told_anything(self, server, origin):
        status, headers, _ = await ask(server, "OPTIONS", CHAT, origin, **PREFLIGHT)
        assert status == 405
        assert not cors_headers(headers)
        _, headers, _ = await ask(server, "GET", "/health", origin)
        assert not cors_headers(headers)
        assert headers["Vary"] == "Origin", "a cache must not give it to the others"

    async def test_without_an_origin_nothing_changes(self, server):
        async with server.session.get(server.url + "/health") as response:
            assert not cors_headers(response.headers)


async def test_any_origin_never_comes_with_credentials(start):
    server = await start(allowed_origins=("*",))
    for method, status in (("OPTIONS", 204), ("GET", 405)):
        got, headers, _ = await ask(server, method, CHAT, "https://any.example", **PREFLIGHT)
        assert (got, headers["Access-Control-Allow-Origin"]) == (status, "*")
        assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize("path", [CHAT, "/v1/models/unload", "/reset_prefix_cache"])
async def test_a_page_cannot_slip_in_a_request_whose_answer_it_may_not_read(server, engine, path):
    """What a form or `fetch(..., {mode: "no-cors"})` of a foreign page sends, with no preflight."""
    headers = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    body = chat(model="tiny")
    status, answer, _ = await server.post(path, body, headers=headers)
    assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")
    assert engine.state == "ready"
    assert (engine.requests, engine.num_clears) == ([], 0)
    for site in ("same-origin", "same-site", "none"):
        status, _, _ = await server.post(CHAT, chat(), headers={"Sec-Fetch-Site": site})
        assert status == 200
