"""LiteLLM's proxy as a contender of the gateway benchmark, from PyPI in its own environment."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway_load import CHAT_PATH, Contender
from gateway_proxies import Listening
from launch import MODEL
from peers import environment, version

PACKAGES = ("litellm[proxy]",)
SHARE = 10  # it gets one of this many calls: each call takes about fifty times as long
STARTING = 180.0  # seconds
_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params: {{model: {provider}/{model}, api_base: "http://127.0.0.1:{port}/v1", api_key: sk-any}}
litellm_settings: {{telemetry: false}}
"""
_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}


@contextmanager
def litellm(port: int, directory: Path, path: str = CHAT_PATH) -> Iterator[Contender]:
    """Run the proxy for the upstream at `port`; raise OSError or SubprocessError if it is not available.

    It translates calls on another path than that of Chat Completions.
    """
    python = environment("litellm", PACKAGES)
    config = directory / "litellm.yaml"
    # Its calls of Messages to `openai` use Responses; the provider of vLLM has Chat Completions alone.
    provider = "openai" if path == CHAT_PATH else "hosted_vllm"
    config.write_text(_CONFIG.format(model=MODEL, port=port, provider=provider))
    own, key = _free_port(), f"sk-{secrets.token_hex(32)}"
    command = [
        str(python.parent / "litellm"),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(own),
    ]
    with (directory / "litellm.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_ENV, "LITELLM_MASTER_KEY": key},
        )
    try:
        _wait_for(own, process)
        name = f"LiteLLM {version(python, 'litellm')}"
        yield Contender(name, Listening(own, [key]), process.pid, SHARE, path)
    finally:
        process.terminate()
        process.wait(STARTING)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + STARTING
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.5)
    raise OSError(f"it did not start: status {process.poll()}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
