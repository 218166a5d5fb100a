"""The console page in a real browser, driven through Chromium's DevTools protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from octavo.server import console
from serving import Server, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
CONTEXT = 2048
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


class Page:
    """A browser's page. `problems`: what its console said, and errors nobody caught."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._id = 0
        self.problems: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=20))
            if message.get("id") == self._id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(params))
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def run(self, expression: str) -> Any:
        """A JavaScript expression's value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        """Wait until a JavaScript condition holds."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press Enter or Escape."""
        code = {"Enter": 13, "Escape": 27}[key]
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def say(self, text: str) -> None:
        """Type a message and send it."""
        self.run("document.querySelector('#message').focus()")
        self.call("Input.insertText", text=text)
        self.press("Enter")

    def texts(self, selector: str) -> list[str]:
        """The text of every element that matches."""
        found: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")
        return found

    def set(self, name: str, value: str) -> None:
        """Fill in a setting."""
        self.run(f"document.querySelector('[name={name}]').value = {value!r}")


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 20
        while not address.exists() or "\n" not in address.read_text():
            assert time.monotonic() < deadline, "chromium does not start"
            time.sleep(0.02)
        port = address.read_text().split()[0]
        targets = httpx.get(f"http://127.0.0.1:{port}/json").json()
        (url,) = (target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        with connect(url, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Server]:
    with serve(tiny_path, "--max-model-len", str(CONTEXT)) as server:
        yield server


@needs_chromium
def test_a_conversation(server: Server, tmp_path: Path) -> None:
    with chromium(tmp_path) as page:
        page.call("Page.navigate", url=server.url)
        page.wait_for("document.querySelector('#model')?.textContent.startsWith('tiny-llama-f32')")
        page.set("temperature", "0")
        page.set("max_completion_tokens", "30")

        # An answer is streamed, and is what the API answers.
        page.say("the cat")
        page.wait_for("document.querySelector('.numbers')")
        messages = [{"role": "user", "content": "the cat"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 30}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status().json()
        first = answer["choices"][0]["message"]["content"]
        assert page.texts(".user .text") == ["the cat"]
        assert page.texts(".assistant .text") == [first]
        (numbers,) = page.texts(".numbers")
        assert re.match(r"first token \d+ ms · \d+\.\d tokens/s · \d+ tokens · prompt 24, 0 of them", numbers)

        # The next turn sends the whole conversation. Markup is text. Shift+Enter begins a line.
        page.call("Input.insertText", text="<img src=x onerror=alert(1)>")
        page.press("Enter", shift=True)
        page.say("<b>dog</b>")
        page.wait_for("document.querySelectorAll('.numbers').length === 2")
        said = "<img src=x onerror=alert(1)>\n<b>dog</b>"
        assert page.texts(".user .text")[1] == said
        assert page.run("document.querySelector('#log img, #log b')") is None
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": said}]
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status().json()
        assert page.texts(".assistant .text")[1] == answer["choices"][0]["message"]["content"]

        # A setting that can't be is shown and nothing is sent.
        page.set("temperature", "9")
        page.say("hello")
        assert page.run("document.querySelector('#settings').hidden") is False
        assert len(page.texts(".user")) == 2
        page.set("temperature", "1")
        page.set("max_completion_tokens", "")
        page.run("document.querySelector('#message').value = ''")

        # Esc stops an answer, and the server notices. Clear forgets.
        for attempt in range(20):  # a random model may end its answer first
            page.set("seed", str(attempt))
            page.say("go on")
            page.press("Escape")
            page.wait_for(f"document.querySelectorAll('.numbers').length === {attempt + 3}")
            if "stopped" in page.texts(".numbers")[-1]:
                break
        assert "stopped" in page.texts(".numbers")[-1]
        server.wait_until_idle(2)
        page.run("document.querySelector('#clear').click()")
        assert page.texts(".turn") == []
        assert page.problems == []

        # Errors are shown, and the message comes back to be sent again.
        page.run("document.querySelector('#message').value = ''")
        page.say("x" * CONTEXT)
        page.wait_for("document.querySelector('.error')")
        assert re.match(r"the prompt has \d+ tokens; the context holds 2048", page.texts(".error")[0])
        assert page.run("document.querySelector('#message').value.length") == CONTEXT
        assert all(url.startswith((server.url, "data:")) for url in page.requested)
        assert len(page.problems) == 1  # the browser's own note that the server answered 400
        assert "status of 400" in page.problems[0]


def test_the_page_is_locked_down(server: Server) -> None:
    for path in ("/", "/console/console.css", "/console/console.js"):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} < set(policy)
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"(src|href)=\"(https?:)?//", response.text)
    assert httpx.get(server.url).headers["content-type"] == "text/html; charset=utf-8"


def test_the_files_keep_their_own_rules() -> None:
    files = {path.name: path.read_text() for path in Path(console.__file__).parent.glob("*.*")}
    assert set(files) == {"__init__.py", "index.html", "console.css", "console.js"}
    assert not re.search(r"<style|style=|<script>|\son\w+=", files["index.html"])
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", files["console.js"]
    )
    for name, text in files.items():
        assert re.findall(r"https?://[^'\s]+", text) in ([], ["http://www.w3.org/2000/svg"]), name
