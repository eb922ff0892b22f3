"""The chat page, driven in a browser: ask, stream, stop, models, settings, errors, keyboard."""

import json

import pytest
from server.fake_engine import until
from server.page.browser import WAIT_S

from jaxinfer.async_engine import QueueFullError
from jaxinfer.sampling_params import InvalidParameter

HACKED = "typeof window.hacked !== 'undefined'"
ATTACK = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> '
    "[a](javascript:window.hacked=1) <a href='data:text/html,x'>b</a> ![c](x)"
)


async def test_an_answer_is_shown_while_it_is_written(page, tab, engine):
    engine.text = "Some *words* of an answer."
    engine.pause_s, engine.hold_after = 0.02, 12
    await page.ask("hi there")
    await tab.until("document.querySelector('.assistant > .markdown').innerText === 'Some words'")
    assert await tab.evaluate("document.getElementById('send').hidden")
    assert "12\xa0tokens" in await tab.text(".stats")
    engine.go_on.set()
    await page.idle()
    assert await page.answer() == "Some words of an answer."
    assert await tab.text(".user .text") == "hi there"
    stats = (await tab.text(".stats")).replace("\xa0", " ").split(" · ")
    assert stats[:2] == ["tiny", "27 tokens"]
    assert 0 < float(stats[2].removesuffix(" tok/s")) <= 51
    assert engine.prompt() == "<user>hi there<assistant>"


async def test_the_conversation_goes_on(page, tab, engine):
    await page.ask("one")
    await page.idle()
    await page.ask("two")
    await page.idle()
    assert engine.prompt() == "<user>one<assistant>hello<user>two<assistant>"
    assert await tab.evaluate("document.querySelectorAll('.message').length") == 4


@pytest.mark.parametrize("how", ["button", "Escape"])
async def test_stopping_keeps_what_is_there_and_frees_the_engine(page, tab, engine, how):
    engine.text = "word " * 2000
    engine.hold_after = 20
    await page.ask("go")
    await tab.until("document.querySelector('.assistant > .markdown').innerText.length > 10")
    await (tab.click("#stop") if how == "button" else tab.press("Escape"))
    await page.idle()
    await until(lambda: len(engine.aborted) == 1, WAIT_S)
    assert await tab.text(".note") == "Stopped."
    assert (await page.answer()).startswith("word word")
    engine.text = "fine"
    await page.ask("again")
    await page.idle()
    assert await page.answer() == "fine"


async def test_stopping_before_the_first_token(page, tab, engine):
    engine.gate.clear()
    await page.ask("go")
    assert await tab.text(".waiting") == "Reading"
    await until(lambda: engine.running, WAIT_S)
    await tab.press("Escape")
    await page.idle()
    await until(lambda: engine.aborted, WAIT_S)
    assert await tab.text(".note") == "Stopped."
    engine.gate.set()
    await page.ask("next")
    await page.idle()
    # What got no answer is not sent again: templates want questions and answers in turn.
    assert engine.prompt() == "<user>next<assistant>"


async def test_the_model_is_picked_and_kept(open_page, tab):
    page = await open_page(served_model_name=("first", "org/second"))
    names = "[...document.querySelectorAll('#model option')].map((option) => option.value)"
    assert await tab.evaluate(names) == ["first", "org/second"]
    await page.ask("hi")
    await page.idle()
    assert (await tab.text(".stats")).startswith("first ·")
    await tab.evaluate("document.getElementById('model').focus()")
    await tab.press("ArrowDown")
    await page.ask("hi")
    await page.idle()
    assert (await tab.text(".stats")).startswith("org/second ·")
    await page.visit()
    assert await tab.evaluate("document.getElementById('model').value") == "org/second"
    assert tab.complaints == []


async def test_settings_are_sent(page, tab, engine):
    await tab.click("#open-settings")
    given = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "20",
        "min_p": "0.05",
        "repetition_penalty": "1.1",
        "max_tokens": "3",
        "seed": "42",
        "system": "Be brief.",
    }
    for name, value in given.items():
        await tab.evaluate(f"document.getElementById('{name}').focus()")
        await tab.type(value)
    await tab.press("Escape")
    await page.ask("hi")
    await page.idle()
    params = engine.requests[-1].params
    assert {name: str(getattr(params, name)) for name in given if name != "system"} == {
        name: value for name, value in given.items() if name != "system"
    }
    assert engine.prompt() == "<system>Be brief.<user>hi<assistant>"
    assert await page.answer() == "hel"
    assert await tab.text(".note") == "Ended at the limit of tokens."
    label = "document.getElementById('open-settings').getAttribute('aria-label')"
    assert await tab.evaluate(label) == "Settings, 8 changed"
    await page.visit()
    assert await tab.evaluate("document.getElementById('top_k').value") == "20"
    await tab.click("#open-settings")
    await tab.click("#reset-settings")
    assert await tab.evaluate(label) == "Settings"


async def test_a_setting_that_cannot_be_is_not_sent(page, tab, engine):
    await tab.click("#open-settings")
    await tab.click("#temperature")
    await tab.type("3")
    await tab.press("Escape")
    await tab.evaluate("document.getElementById('prompt').focus()")
    await tab.type("hi")
    await tab.press("Enter")
    await tab.until("document.getElementById('settings').open")
    assert await tab.evaluate("document.activeElement.id") == "temperature"
    assert await tab.evaluate("document.getElementById('prompt').value") == "hi"
    assert engine.requests == []


class TestErrors:
    """What a server says when it refuses is shown, and the page goes on."""

    @pytest.mark.parametrize(
        ("fault", "refusal", "said"),
        [
            (None, InvalidParameter("top_k", "top_k must be less"), "top_k must be less"),
            (QueueFullError("512 requests wait"), None, "512 requests wait"),
            (RuntimeError("boom"), None, "internal error while answering request"),
        ],
        ids=["400", "429", "500"],
    )
    async def test_refusals(self, open_page, tab, engine, fault, refusal, said):
        page = await open_page()
        engine.fault, engine.refusal = fault, refusal
        await page.ask("hi")
        await page.idle()
        assert said in await tab.text(".error")
        engine.fault = engine.refusal = None
        await tab.click(".assistant.last .last-only")
        await page.idle()
        assert await tab.text(".error") == ""
        assert await page.answer() == "hello"
        assert engine.prompt() == "<user>hi<assistant>"
        [complaint] = tab.complaints
        assert complaint.startswith("Failed to load resource")  # the browser's, of the status

    async def test_an_error_in_the_middle_of_an_answer(self, page, tab, engine):
        engine.fault, engine.fault_after = "error", 3
        await page.ask("hi")
        await page.idle()
        assert "internal error" in await tab.text(".error")
        assert await page.answer() == "hel"

    async def test_a_question_that_failed_is_not_part_of_the_next(self, open_page, tab, engine):
        page = await open_page()
        engine.fault = QueueFullError("full")
        await page.ask("one")
        await page.idle()
        engine.fault = None
        await page.ask("two")
        await page.idle()
        assert engine.prompt() == "<user>two<assistant>"
        assert await tab.text(".user .text") == "two"

    async def test_a_context_that_is_too_long(self, open_page, tab, engine):
        engine.max_model_len = 64
        page = await open_page()
        await page.ask("x" * 100)
        await page.idle()
        assert "maximum context length is 64 tokens" in await tab.text(".error")

    async def test_a_server_that_is_gone(self, open_page, tab, engine):
        page = await open_page()
        await tab.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        await page.ask("hi")
        await page.idle()
        assert await tab.text(".error") == "The server cannot be reached. Is it running?"


async def test_what_is_written_never_becomes_markup(open_page, tab, engine):
    page = await open_page(served_model_name=(ATTACK[:40], "b"))
    engine.text = (
        f"{ATTACK}\n\n# {ATTACK}\n\n| {ATTACK} | b |\n|---|---|\n| {ATTACK} |\n\n```{ATTACK}"
    )
    await page.ask(ATTACK)
    await page.idle()
    assert await tab.text(".user .text") == ATTACK
    assert (await page.answer()).startswith(ATTACK)
    await page.visit()
    assert (await page.answer()).startswith(ATTACK)
    engine.refusal = InvalidParameter("prompt", ATTACK)
    await tab.click(".assistant.last .last-only")
    await page.idle()
    assert ATTACK in await tab.text(".error")
    assert not await tab.evaluate(HACKED)
    made = "[...document.querySelectorAll('main *')].map((element) => element.tagName)"
    assert not {"IMG", "SCRIPT", "A", "IFRAME"} & set(await tab.evaluate(made))
    assert [url for url in tab.requests if not url.startswith(page.url)] == []
    # Were there a way to make markup of text, the browser would refuse it.
    with pytest.raises(AssertionError, match="TrustedHTML"):
        await tab.evaluate("document.body.innerHTML = '<img src=x onerror=window.hacked=1>'")


class TestEditing:
    """The last question can be asked again, as it was or changed; a chat can be left."""

    async def test_answering_again(self, page, tab, engine):
        await page.ask("one")
        await page.idle()
        engine.text = "other"
        await tab.click(".assistant.last .last-only")
        await page.idle()
        assert await page.answer() == "other"
        assert engine.prompt() == "<user>one<assistant>"
        assert await tab.evaluate("document.querySelectorAll('.message').length") == 2

    async def test_editing_the_last_question(self, page, tab, engine):
        await page.ask("one")
        await page.idle()
        await page.ask("two")
        await page.idle()
        await tab.click(".user.last .last-only")
        await tab.type(", changed")
        await tab.press("Enter")
        await page.idle()
        assert engine.prompt() == "<user>one<assistant>hello<user>two, changed<assistant>"
        assert await tab.evaluate("document.querySelectorAll('.message').length") == 4

    async def test_editing_can_be_given_up(self, page, tab, engine):
        await page.ask("one")
        await page.idle()
        await tab.click(".user.last .last-only")
        await tab.type(" more")
        await tab.press("Escape")
        assert await tab.evaluate("document.querySelector('.edit')") is None
        assert await tab.text(".user .text") == "one"
        assert await tab.evaluate("document.activeElement.textContent") == "Edit"
        assert len(engine.requests) == 1

    async def test_a_new_chat_and_its_undoing(self, page, tab, engine):
        await page.ask("one")
        await page.idle()
        await tab.click("#new-chat")
        assert await tab.evaluate("document.querySelectorAll('.message').length") == 0
        assert await tab.text("#welcome h2")
        await page.ask("two")
        await page.idle()
        assert engine.prompt() == "<user>two<assistant>"
        await tab.click("#toast button")
        texts = "[...document.querySelectorAll('.user .text')].map((text) => text.innerText)"
        assert await tab.evaluate(texts) == ["one", "two"]

    async def test_a_new_chat_ends_the_answer_being_written(self, page, tab, engine):
        engine.text, engine.hold_after = "word " * 1000, 20
        await tab.evaluate("window.requestAnimationFrame = (draw) => { window.late = draw; }")
        await page.ask("one")
        await tab.until("typeof window.late === 'function'")
        await tab.click("#new-chat")
        await until(lambda: engine.aborted, WAIT_S)
        await tab.evaluate("window.late()")
        assert await tab.evaluate("document.querySelectorAll('.message').length") == 0

    async def test_an_example_is_a_question(self, page, tab, engine):
        text = await tab.text("#examples button")
        await tab.click("#examples button")
        await page.idle()
        assert engine.prompt() == f"<user>{text}<assistant>"


class TestKeeping:
    """The conversation outlives a reload, and a browser that keeps nothing is no harm."""

    async def test_a_reload_changes_nothing(self, page, tab, engine):
        engine.text = "**bold**"
        await page.ask("one")
        await page.idle()
        shown = await tab.text("#messages")
        await page.visit()
        assert await tab.text("#messages") == shown
        assert await tab.evaluate("document.querySelectorAll('strong').length") == 1
        await page.ask("two")
        await page.idle()
        assert engine.prompt() == "<user>one<assistant>**bold**<user>two<assistant>"

    @pytest.mark.parametrize(
        "stored",
        [
            "{",
            "null",
            "[1]",
            '{"version": 0, "messages": 3}',
            '{"version": 1, "messages": [null, 3, {}, {"role": "user"}], "settings": 3}',
            '{"version": 1, "messages": {}, "settings": {"top_k": []}, "model": 3}',
        ],
    )
    async def test_whatever_is_stored(self, page, tab, stored):
        await tab.evaluate("sessionStorage.clear()")
        await tab.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source=f"localStorage.setItem('jaxinfer.chat', {json.dumps(stored)})",
        )
        await page.visit()
        await page.ask("hi")
        await page.idle()
        assert await page.answer() == "hello"

    async def test_without_storage(self, page, tab):
        refuse = "Object.defineProperty(window, '{}', {{get() {{ throw new Error('no') }}}})"
        source = "; ".join(refuse.format(name) for name in ("localStorage", "sessionStorage"))
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=source)
        await page.visit()
        await page.ask("hi")
        await page.idle()
        assert await page.answer() == "hello"
