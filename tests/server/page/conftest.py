"""A browser tab that shows the page of a server with a fake engine."""

import asyncio
import contextlib
import json

import pytest
from server.fake_engine import FakeAsyncEngine
from server.page.browser import browser, find_browser, new_tab


class PageEngine(FakeAsyncEngine):
    """With room for long answers.

    Attributes a test may set: `pause_s`, which goes by before each token; `hold_after`, the number
    of tokens of an answer after which `go_on` is waited for.
    """

    def __init__(self):
        super().__init__(max_model_len=20_000)
        self.pause_s = 0.0
        self.hold_after = None
        self.go_on = asyncio.Event()

    async def generate(self, request):
        count = 0
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                if count == self.hold_after:
                    await self.go_on.wait()
                await asyncio.sleep(self.pause_s)
                count += 1
                yield delta

    def prompt(self, index=-1):
        """The text of a request's prompt."""
        return self.tokenizer.decode(self.requests[index].prompt_token_ids)


class Page:
    """The page in a tab, as a user meets it."""

    def __init__(self, tab, server):
        self.tab, self.server, self.url = tab, server, f"{server.url}/"

    async def visit(self):
        await self.tab.visit(self.url)
        await self.tab.until("!document.getElementById('model').disabled")

    async def ask(self, text):
        """Types a question and sends it."""
        await self.tab.evaluate("document.getElementById('prompt').focus()")
        await self.tab.type(text)
        await self.tab.press("Enter")
        await self.tab.until("document.getElementById('prompt').value === ''")

    async def idle(self):
        """Waits until no answer is being written."""
        await self.tab.until("document.getElementById('stop').hidden")

    async def answer(self):
        """The visible text of the last answer."""
        return await self.tab.text(".assistant > .markdown")

    async def choose_model(self, name):
        await self.tab.evaluate(
            f"(() => {{ const picker = document.getElementById('model');"
            f" picker.value = {json.dumps(name)};"
            " picker.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )


@pytest.fixture
def engine():
    return PageEngine()


@pytest.fixture(scope="module")
def browser_address(tmp_path_factory):
    if find_browser() is None:
        pytest.skip("no browser: install chromium, or name one in CHROME_BIN")
    with browser(tmp_path_factory.mktemp("browser") / "home") as address:
        yield address


@pytest.fixture
async def tab(browser_address):
    async with new_tab(browser_address) as tab:
        yield tab


@pytest.fixture
async def open_page(tab, start):
    """Returns a function that starts a server with some settings and shows its page."""

    async def go(**settings):
        page = Page(tab, await start(**settings))
        await page.visit()
        return page

    return go


@pytest.fixture
async def page(open_page, tab):
    """The page, which must have nothing to complain about."""
    page = await open_page()
    yield page
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(page.url)] == []
