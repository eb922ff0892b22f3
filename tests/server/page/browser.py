"""A headless Chromium, driven over its DevTools protocol: as much of it as a page's tests need."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)
START_S = 60
WAIT_S = 30

# name -> (code, Windows' virtual key code, text)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    " ": ("Space", 32, " "),
    "ArrowDown": ("ArrowDown", 40, ""),
}
SHIFT = 8


def find_browser():
    """The program, from CHROME_BIN or PATH, or None."""
    given = os.environ.get("CHROME_BIN")
    found = (shutil.which(name) for name in ([given] if given else NAMES))
    return next((path for path in found if path), None)


@contextlib.contextmanager
def browser(folder):
    """Runs a browser that keeps everything below `folder`; yields its DevTools address."""
    folder.mkdir(parents=True)
    profile = folder / "profile"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [find_browser(), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            # Nothing of the user's own browser is read or written.
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        yield _address(process, profile / "DevToolsActivePort", folder / "log")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process, port_file, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if port_file.exists() and len(lines := port_file.read_text().split()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start:\n{log.read_text()[-2000:]}")


@contextlib.asynccontextmanager
async def new_tab(address):
    """Yields a Tab with its own storage."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        tab = Tab(socket)
        reading = asyncio.create_task(tab.read())
        context = await tab.call("Target.createBrowserContext", session=False)
        try:
            await tab.open(context["browserContextId"])
            yield tab
        finally:
            await tab.call("Target.disposeBrowserContext", session=False, **context)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class Tab:
    """A tab.

    Attributes:
      complaints: what its console holds of warnings, errors and uncaught exceptions.
      requests: addresses it has asked for.
    """

    def __init__(self, socket):
        self._socket = socket
        self._session = None
        self._ids = itertools.count(1)
        self._replies = {}
        self._loaded = asyncio.Event()
        self.complaints = []
        self.requests = []

    async def open(self, context):
        target = await self.call(
            "Target.createTarget", session=False, url="about:blank", browserContextId=context
        )
        attached = await self.call(
            "Target.attachToTarget", session=False, flatten=True, targetId=target["targetId"]
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(1280, 800)

    async def call(self, method, *, session=True, **params):
        """Calls a method of the protocol and returns its result."""
        message = {"id": next(self._ids), "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        reply = self._replies[message["id"]] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(START_S):
            answer = await reply
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def read(self):
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._replies.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method, params):
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            said = details.get("exception", {}).get("description") or details["text"]
            self.complaints.append(said)
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            said = " ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"])
            self.complaints.append(said)
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def visit(self, url):
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(START_S):
            await self._loaded.wait()

    async def evaluate(self, expression):
        """Returns the value of an expression in JavaScript, of its promise if it is one."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression, timeout_s=WAIT_S):
        """Waits until an expression holds, and returns its value."""
        end = time.monotonic() + timeout_s
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is {value!r} after {timeout_s} s"
            await asyncio.sleep(0.02)
        return value

    async def text(self, selector):
        """The visible text of the last element that fits."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        return await self.evaluate(f"{found}?.innerText ?? null")

    async def click(self, selector):
        """Presses the mouse in the middle of an element, which has to be there to be hit."""
        place = await self.until(
            "(() => {"
            f" const found = [...document.querySelectorAll({json.dumps(selector)})].at(-1);"
            " if (!found?.checkVisibility()) return null;"
            " found.scrollIntoView({block: 'nearest'});"
            " const box = found.getBoundingClientRect();"
            " const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];"
            " return found.contains(document.elementFromPoint(x, y)) ? {x, y} : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place
            )

    async def type(self, text):
        """Writes into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key, modifiers=0):
        code, number, text = KEYS[key]
        event = {
            "key": key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": modifiers,
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **event, **down)
        await self.call("Input.dispatchKeyEvent", **event, type="keyUp")

    async def resize(self, width, height, *, is_phone=False):
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    async def prefer(self, **features):
        """Sets media features, such as color_scheme="dark"."""
        named = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=named)

    async def screenshot(self, path):
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
