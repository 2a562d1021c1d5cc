"""Runs in the sandbox: drives Chromium for a model, which sees a screenshot and the elements of each page.

It needs Python's standard library and `chromium`, which it drives through a pipe (the DevTools protocol). The
answer is printed.
"""

import base64
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MOST_STEPS = 20
SECONDS = 60  # for an answer of the browser
FLAGS = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--window-size=800,600"),
    # Everything that a page does not need: GPU, extensions, services of Google, caches on disk.
    *("--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--no-first-run", "--disable-component-update", "--disable-breakpad", "--mute-audio"),
    *(
        "--renderer-process-limit=1",
        "--disk-cache-size=1",
        "--disable-features=Translate,SpareRendererForSitePerProcess",
    ),
)
LIST_ELEMENTS = """[document.body.innerText.slice(0, 2000),
 [...document.querySelectorAll("a, button, input")].map(element => {
   const box = element.getBoundingClientRect();
   const name = element.innerText || element.value || element.placeholder;
   return {name, link: element.tagName === "A", x: box.x + box.width / 2, y: box.y + box.height / 2};
 })]"""
TOOL = {
    "name": "act",
    "description": "Click an element, click it and type a text, or finish with an answer.",
    "parameters": {
        "type": "object",
        "properties": {
            "click": {"type": "integer", "description": "number of the element"},
            "type": {"type": "string", "description": "text to type after the click"},
            "answer": {"type": "string", "description": "finishes the task"},
        },
    },
}


class Browser:
    """Chromium with one page."""

    def __init__(self, profile: str) -> None:
        # Chromium reads commands from descriptor 3 and writes to 4.
        asks, self._ask = os.pipe()
        self._said, says = os.pipe()
        words = ["chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = ["sh", "-c", f'exec "$@" 3<&{asks} 4>&{says}', "sh", *words]
        with Path(profile + ".log").open("wb") as log:
            self.process = subprocess.Popen(shell, pass_fds=(asks, says), stdout=log, stderr=log)
        os.close(asks)
        os.close(says)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._events: list[str] = []
        self._session = None
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._events.append(answer.get("method", ""))

    def open(self, url: str) -> None:
        self._events.clear()
        self.call("Page.navigate", url=url)
        self._wait_load()

    def look(self) -> tuple[bytes, str, list[dict]]:
        """Return a screenshot, the text of the page, and its elements."""
        text, elements = self.call("Runtime.evaluate", expression=LIST_ELEMENTS, returnByValue=True)[
            "result"
        ]["value"]
        picture = self.call("Page.captureScreenshot", format="png")["data"]
        return base64.b64decode(picture), text, elements

    def click(self, element: dict) -> None:
        self._events.clear()
        place = {"x": element["x"], "y": element["y"], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)
        if element["link"]:
            self._wait_load()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self.process.wait(SECONDS)

    def _wait_load(self) -> None:
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._read().get("method", ""))

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            piece = os.read(self._said, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def ask_model(messages: list[dict]) -> dict:
    body = {
        "model": os.environ["MODEL"],
        "messages": messages,
        "tools": [{"type": "function", "function": TOOL}],
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['MODEL_KEY']}"}
    url = f"{os.environ['MODEL_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def describe_page(picture: bytes, text: str, elements: list[dict]) -> list[dict]:
    names = "\n".join(f"[{number}] {element['name']}" for number, element in enumerate(elements))
    image = {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}
    return [{"type": "text", "text": f"{text}\n\n{names}"}, {"type": "image_url", "image_url": image}]


def solve(task: str, browser: Browser) -> str:
    messages: list[dict] = [{"role": "user", "content": task}]
    for _ in range(MOST_STEPS):
        page = browser.look()
        messages.append({"role": "user", "content": describe_page(*page)})
        reply = ask_model(messages)
        messages.append(reply)
        for call in reply.get("tool_calls") or ():
            action = json.loads(call["function"]["arguments"])
            if "answer" in action:
                return action["answer"]
            browser.click(page[2][action["click"]])
            if "type" in action:
                browser.type(action["type"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    raise RuntimeError(f"no answer after {MOST_STEPS} steps")


def main() -> None:
    handler = functools.partial(QuietHandler, directory="site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(f"{os.environ['HOME']}/profile")
        browser.open(f"http://127.0.0.1:{server.server_port}/index.html")
        print(solve(Path(sys.argv[1]).read_text(), browser))
        browser.close()
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the files of the shop."""

    def log_message(self, *words: object) -> None:
        return


if __name__ == "__main__":
    main()
