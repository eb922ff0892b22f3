"""The chat page for everyone: keyboards, phones, screen readers, themes, keys, slow starts."""

import asyncio
import json

import pytest
from aiohttp import web
from server.page.browser import SHIFT
from server.page.conftest import Page

FOCUSED = "document.activeElement.id || document.activeElement.textContent.trim()"
WIDE = (
    "x" * 300
    + f"\n\n# {'y' * 100}\n\n```python\n{'z' * 300}\n```\n\n"
    + f"| {' | '.join(['column'] * 20)} |\n{'|---' * 20}|\n\n- {'w' * 200}\n\n`{'v' * 200}`"
)
OVERFLOW = (
    "[document.scrollingElement, document.getElementById('scroller')]"
    ".map((element) => element.scrollWidth - element.clientWidth)"
)


async def test_everything_with_the_keyboard_alone(open_page, tab, engine):
    page = await open_page(served_model_name=("a", "b"))
    await tab.evaluate("document.querySelector('.skip').focus()")
    order = []
    for _ in range(7):
        if order:
            await tab.press("Tab")
        order.append(await tab.evaluate(FOCUSED))
        outline = await tab.evaluate(
            "(() => { const box = document.activeElement.closest('#composer')"
            " ?? document.activeElement; return getComputedStyle(box).outlineStyle; })()"
        )
        assert outline in ("solid", "auto"), f"{order[-1]} shows no focus"
    examples = order[3:6]
    assert order[:3] == ["Skip to the message box", "model", "open-settings"]
    assert all(example.endswith(".") for example in examples)
    assert order[6] == "prompt"
    await tab.evaluate("document.getElementById('prompt').focus()")
    await tab.type("one")
    await tab.press("Enter", SHIFT)
    await tab.type("two")
    await tab.press("Enter")
    await page.idle()
    assert engine.prompt() == "<user>one\ntwo<assistant>"
    await tab.evaluate("document.getElementById('open-settings').focus()")
    await tab.press("Enter")
    assert await tab.evaluate("document.getElementById('settings').open")
    for _ in range(20):
        await tab.press("Tab")
    inside = "document.activeElement.closest('#settings') !== null || document.activeElement.id"
    assert await tab.evaluate(inside) in (True, "", "settings"), "the focus left the dialog"
    await tab.press("Escape")
    assert not await tab.evaluate("document.getElementById('settings').open")
    assert await tab.evaluate(FOCUSED) == "open-settings"
    await tab.evaluate("document.querySelector('.user.last .last-only').focus()")
    await tab.press("Enter")
    await tab.type("!")
    await tab.press("Enter")
    await page.idle()
    assert engine.prompt() == "<user>one\ntwo!<assistant>"
    await tab.evaluate("document.querySelector('.assistant.last .last-only').focus()")
    await tab.press(" ")
    await page.idle()
    assert len(engine.requests) == 3
    assert tab.complaints == []


async def test_enter_that_ends_a_composed_word_sends_nothing(page, tab, engine):
    await tab.evaluate("document.getElementById('prompt').focus()")
    await tab.type("hi")
    await tab.evaluate(
        "document.getElementById('prompt').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    assert await tab.evaluate("document.getElementById('prompt').value") == "hi"
    assert engine.requests == []


async def test_a_phone_never_scrolls_sideways(page, tab, engine):
    await tab.resize(360, 740, is_phone=True)
    await page.visit()
    assert await tab.evaluate(OVERFLOW) == [0, 0]
    engine.text = WIDE
    await page.ask("x" * 300)
    await page.idle()
    assert await tab.evaluate(OVERFLOW) == [0, 0]
    # What is wide scrolls by itself.
    assert await tab.evaluate(
        "['.code pre', '.table'].every((name) => { const box = document.querySelector(name);"
        " return box.scrollWidth > box.clientWidth; })"
    )
    await tab.click("#open-settings")
    assert await tab.evaluate(
        "(() => { const box = document.getElementById('settings');"
        " return [box.getBoundingClientRect().width, box.scrollWidth - box.clientWidth]; })()"
    ) == [360, 0]
    small = (
        "[...document.querySelectorAll('button, select, input, textarea')]"
        ".filter((element) => element.checkVisibility())"
        ".filter((element) => element.getBoundingClientRect().height < 24)"
        ".map((element) => element.outerHTML)"
    )
    assert await tab.evaluate(small) == []


async def test_the_page_fits_the_window(page, tab, engine):
    engine.text = "line\n\n" * 100
    for _ in range(2):
        await page.ask("hi")
        await page.idle()
    assert await tab.evaluate(
        "document.scrollingElement.scrollHeight === document.scrollingElement.clientHeight"
    )


async def test_the_end_is_followed_unless_one_reads_above(page, tab, engine):
    at_end = (
        "(() => { const s = document.getElementById('scroller');"
        " return s.scrollHeight - s.scrollTop - s.clientHeight < 2; })()"
    )
    engine.text, engine.pause_s = "line\n\n" * 60, 0.002
    await tab.resize(360, 500, is_phone=True)
    await page.ask("hi")
    await page.idle()
    assert await tab.evaluate(at_end)
    await page.ask("more")
    await tab.until("document.querySelectorAll('.assistant.busy > .markdown p').length > 10")
    await tab.evaluate("document.getElementById('scroller').scrollTop = 0")
    await page.idle()
    assert await tab.evaluate("document.getElementById('scroller').scrollTop") == 0
    await tab.click("#to-end")
    assert await tab.evaluate(at_end)
    await tab.until("document.getElementById('to-end').hidden")


async def test_every_control_has_a_name(page, tab, engine):
    engine.text = "```python\nx\n```"
    await page.ask("hi")
    await page.idle()
    await tab.click("#open-settings")
    tree = await tab.call("Accessibility.getFullAXTree")
    roles = ("button", "textbox", "combobox", "spinbutton", "dialog", "main", "link")
    nodes = [node for node in tree["nodes"] if not node["ignored"]]
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if node["role"]["value"] in roles
    ]
    assert [role for role, name in named if not name] == []
    assert ("dialog", "Settings") in named
    assert ("spinbutton", "Repetition penalty") in named
    assert len([role for role, _ in named if role == "spinbutton"]) == 7
    await tab.press("Escape")
    tree = await tab.call("Accessibility.getFullAXTree")
    names = {node["name"]["value"] for node in tree["nodes"] if node.get("name")}
    assert {"Copy the code", "Copy the answer", "Answer again", "Edit the message"} <= names


async def test_a_screen_reader_hears_each_block_once(page, tab, engine):
    engine.text, engine.hold_after = "First block.\n\nSecond block.\n\n- third", 20
    await page.ask("hi")
    said = "[...document.getElementById('spoken').children].map((said) => said.textContent)"
    await tab.until(f"{said}.length === 1")
    assert await tab.evaluate(said) == ["First block."]
    engine.go_on.set()
    await page.idle()
    assert await tab.evaluate(said) == [
        "First block.",
        "Second block.",
        "third",
        "End of the answer.",
    ]
    region = "document.getElementById('spoken').getAttribute('aria-live')"
    assert await tab.evaluate(region) == "polite"


async def test_light_and_dark(page, tab):
    backgrounds = []
    for scheme in ("light", "dark"):
        await tab.prefer(color_scheme=scheme)
        colours = await tab.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.body).color]"
        )
        backgrounds.append([sum(json.loads(f"[{colour[4:-1]}]")) / 3 for colour in colours])
    [[light, dark_text], [dark, light_text]] = backgrounds
    assert light > 240
    assert dark_text < 60
    assert dark < 40
    assert light_text > 200


@pytest.mark.parametrize(("wish", "moves"), [("no-preference", True), ("reduce", False)])
async def test_nothing_moves_where_it_is_not_welcome(page, tab, engine, wish, moves):
    await tab.prefer(reduced_motion=wish)
    await page.visit()
    engine.gate.clear()
    await page.ask("hi")
    await tab.until("document.querySelector('.waiting').checkVisibility()")
    animations = await tab.evaluate("document.getAnimations().length")
    assert (animations > 0) == moves
    engine.gate.set()
    await page.idle()


class TestKeys:
    """A server with keys: the page is open, its API is not."""

    async def test_the_key_is_asked_for(self, tab, start, engine):
        server = await start(api_key=("secret",))
        page = Page(tab, server)
        await tab.visit(page.url)
        await tab.until("document.getElementById('key-dialog').open")
        assert await tab.evaluate(FOCUSED) == "key"
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.getElementById('key-reason').textContent !== ''")
        assert await tab.text("#key-reason") == "The server does not know this key."
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until("!document.getElementById('model').disabled")
        await page.ask("hi")
        await page.idle()
        assert await page.answer() == "hello"
        kept = await tab.evaluate("JSON.stringify(localStorage)")
        assert "jaxinfer.chat" in kept
        assert "secret" not in kept
        await page.visit()
        await tab.click("#open-settings")
        await tab.click("#forget-key")
        await tab.press("Escape")
        await page.ask("hi")
        await tab.until("document.getElementById('key-dialog').open")
        await tab.press("Escape")
        await page.idle()
        assert "a valid key is needed" in await tab.text(".error")
        assert all("Failed to load resource" in complaint for complaint in tab.complaints)


async def test_a_model_that_is_still_loading(tab, start, engine):
    engine.loaded_event.clear()
    server = await start(wait=False)
    await tab.visit(f"{server.url}/")
    await tab.until("document.getElementById('status').textContent.startsWith('Loading model')")
    engine.loaded_event.set()
    await tab.until("!document.getElementById('model').disabled")
    assert await tab.evaluate("document.getElementById('status').hidden")


def scripted(*deltas, ending=b"data: [DONE]\n\n"):
    """A handler of chats that sends these deltas and this ending."""

    async def handler(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": ping\r\n\r\n")
        for delta in deltas:
            chunk = {"model": "m", "choices": [{"index": 0, "delta": delta}]}
            event = f"data: {json.dumps(chunk)}\n\n".encode()
            # Cut anywhere, as networks do.
            for piece in (event[:9], event[9:-1], event[-1:]):
                await response.write(piece)
                await asyncio.sleep(0.01)
        await response.write(ending)
        return response

    return handler


async def test_thoughts_are_folded(open_page, tab, monkeypatch):
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": "Let me "}, {"reasoning_content": "**think**."}]
    deltas += [{"content": "It is "}, {"content": "4 — “é”."}]
    monkeypatch.setattr("jaxinfer.server.handlers.chat_completions", scripted(*deltas))
    page = await open_page()
    await page.ask("2 + 2?")
    await page.idle()
    assert await page.answer() == "It is 4 — “é”."
    assert await tab.text(".reasoning summary") == "Thoughts"
    thoughts = "document.querySelector('.reasoning .markdown')"
    assert not await tab.evaluate(f"{thoughts}.checkVisibility()")
    await tab.click(".reasoning summary")
    await tab.until(f"{thoughts}.checkVisibility()")
    assert await tab.text(".reasoning .markdown") == "Let me think."
    assert tab.complaints == []


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (b"", "The connection ended before the answer did."),
        (b'data: {"error": {"message": "out of pages"}}\n\n', "out of pages"),
        (b'data: {"error": "odd"}\n\n', "The answer broke off."),
        (b"data: {\n\n", "The page could not read the server's answer."),
    ],
    ids=["nothing", "error", "odd error", "no JSON"],
)
async def test_answers_that_end_badly(open_page, tab, monkeypatch, ending, said):
    handler = scripted({"content": "part"}, ending=ending)
    monkeypatch.setattr("jaxinfer.server.handlers.chat_completions", handler)
    page = await open_page()
    await page.ask("hi")
    await page.idle()
    assert await tab.text(".error") == said
    assert await page.answer() == "part"


async def test_code_is_copied(page, tab, engine):
    engine.text = "Look:\n\n```python\nprint('<b>')\n\tif x:\n```\n"
    await tab.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="navigator.clipboard.writeText = async (text) => { window.copied = text; }",
    )
    await page.visit()
    await page.ask("hi")
    await page.idle()
    await tab.click(".copy-code")
    assert await tab.evaluate("window.copied") == "print('<b>')\n\tif x:"
    await tab.until("document.querySelector('.copy-code').textContent === 'Copied'")
    await tab.click(".assistant .actions button:first-child")
    await tab.until(f"window.copied === {json.dumps(engine.text)}")
