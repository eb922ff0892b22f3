"""The chat page's files as the server gives them; no browser is needed."""

import re
from pathlib import Path

from jaxinfer.server import page

FOLDER = Path(page.__file__).with_name("page")
MAX_LINES = 400


async def get(server, path, **options):
    async with server.session.get(server.url + path, **options) as response:
        return response, await response.text()


async def test_every_file_is_served_with_its_type(server):
    types = {"": "text/html", ".js": "text/javascript", ".css": "text/css"}
    for path in page.PATHS:
        response, text = await get(server, path)
        assert response.status == 200
        kind = types.get(Path(path).suffix, "image/svg+xml")
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert text == (FOLDER / (Path(path).name or "index.html")).read_text(encoding="utf-8")
    assert len(page.PATHS) == len(list(FOLDER.iterdir()))


async def test_the_policy_lets_nothing_in(server):
    response, text = await get(server, "/")
    policy = dict(
        rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy)
    # Nothing inline, which the policy would stop, and nothing from elsewhere.
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", text)
    for path in page.PATHS:
        _, text = await get(server, path)
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


async def test_a_browser_that_has_a_file_gets_no_second(server):
    response, _ = await get(server, "/page/chat.js")
    etag = response.headers["ETag"]
    assert response.headers["Cache-Control"] == "no-cache"
    again, text = await get(server, "/page/chat.js", headers={"If-None-Match": etag})
    assert (again.status, text, again.headers["ETag"]) == (304, "", etag)
    assert "Content-Security-Policy" in again.headers
    changed, text = await get(server, "/page/chat.js", headers={"If-None-Match": '"old"'})
    assert changed.status == 200
    assert text
    async with server.session.head(server.url + "/") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_there_is_no_other_file(server):
    for path in ("/page/page.py", "/page/..%2Fpage.py", "/page/", "/page/index.html"):
        status, body, _ = await server.get(path)
        assert (status, body["error"]["type"]) == (404, "invalid_request_error")


async def test_the_page_needs_no_key_and_all_else_does(start):
    server = await start(api_key=("secret",))
    for path in page.PATHS:
        assert (await get(server, path))[0].status == 200
    for path in ("/page/other.js", "/v1/models"):
        assert (await get(server, path))[0].status == 401


def test_files_stay_small():
    sizes = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.iterdir()
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}
