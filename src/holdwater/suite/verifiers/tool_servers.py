"""Runs inside a sandbox: starts a task's tool servers, then the agent's program with their addresses.

`python tool_servers.py SETTINGS STATE -- argv...` with the interpreter that has verifiers; it must not import
holdwater. It serves the channel on which tool servers read the task and share its state, and writes the last
state to the file STATE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # for a tool server to answer
NO_ANSWER = 93  # the exit status if a tool server does not answer
STEP = 0.1  # seconds between two looks at a server that starts


class StateChannel(ThreadingHTTPServer):
    """The task, and the state that tool servers read before each call and replace after it."""

    daemon_threads = True

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), ChannelHandler)
        self.secret = settings["secret"]
        self.task = json.dumps(settings["task"]).encode()
        self.state = settings["state"].encode()


class ChannelHandler(BaseHTTPRequestHandler):
    server: StateChannel

    def do_GET(self) -> None:
        self._answer(self.server.task if self.path.endswith("/task") else self.server.state)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._knows_secret():
            self.server.state = content
        self._answer(b"{}")

    def log_message(self, format: str, *arguments: Any) -> None:
        return

    def _knows_secret(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {self.server.secret}"

    def _answer(self, content: bytes) -> None:
        self.send_response(200 if self._knows_secret() else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main(settings_file: str, state_file: str, argv: list[str]) -> int:
    settings = json.loads(Path(settings_file).read_text())
    channel = StateChannel(settings)
    threading.Thread(target=channel.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{channel.server_address[1]}/state"
    for server in settings["servers"]:
        port = start_server(server, url, settings)
        argv = [word.replace(server["placeholder"], f"127.0.0.1:{port}") for word in argv]
    status = subprocess.run(argv, check=False).returncode
    Path(state_file).write_bytes(channel.state)
    return status


def start_server(server: dict[str, Any], url: str, settings: dict[str, Any]) -> int:
    """Start a tool server; return its port when it answers."""
    port_file = Path(tempfile.mkdtemp(), "port")
    log = port_file.with_name("log")
    channel = {"VF_STATE_URL": url if server["own"] else "", "VF_STATE_SECRET": settings["secret"]}
    variables = {"VF_CONFIG": server["config"], "MCP_PORT_FILE": str(port_file), **channel}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", server["module"]],
            env={**os.environ, "PYTHONPATH": settings["sources"], **variables},
            stdout=out,
            stderr=out,
        )
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        text = port_file.read_text() if port_file.exists() else ""
        if text and answers(int(text)):
            return int(text)
        time.sleep(STEP)
    log_end = log.read_text(errors="replace")[-1500:]
    sys.stderr.write(f"tool server `{server['name']}` does not answer: {log_end}")
    sys.exit(NO_ANSWER)


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/mcp", timeout=2).close()
    except urllib.error.HTTPError:
        return True  # any answer, also to a request that is no call
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[4:]))
