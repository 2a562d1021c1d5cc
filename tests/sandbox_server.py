"""A sandbox server in a process of its own, as on another machine, and a connection that can be cut."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.command_runner import MARK, Command, find_carriers, until
from tests.registry_server import free_port

TOKEN = "a token of the tests"


class ServedSandboxes:
    """`holdwater sandboxd` on one port and one directory; it can be killed and started again."""

    def __init__(
        self,
        place: Path,
        *words: str,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.place = place
        self.port = free_port()
        self.directory = place / "server"
        self.token = place / "token"
        place.mkdir(parents=True, exist_ok=True)
        self.token.write_text(TOKEN + "\n")
        self.token.chmod(0o600)
        self.host = host
        self.words = words
        self._before, self._env = before, env
        self._commands: list[Command] = []

    @property
    def url(self) -> str:
        scheme = "https" if "--tls-cert" in self.words else "http"
        return f"{scheme}://{self.host}:{self.port}"

    @property
    def command(self) -> Command:
        """The process of the latest start."""
        return self._commands[-1]

    def start(self) -> Command:
        words = ["sandboxd", "--listen", f"{self.host}:{self.port}", "--token-file", str(self.token)]
        command = Command(
            self.place / "commands",
            *words,
            *("--out", str(self.directory), "--json", *self.words),
            before=self._before,
            env=self._env,
        )
        self._commands.append(command)
        until(f"the server listens: {command}", lambda: command.stdout or not command.running)
        assert command.running, command
        address = json.loads(command.stdout)["address"]
        assert address.endswith(f":{self.port}"), address
        return command

    def kill(self) -> None:
        """As `kill -9` of the whole process group does, or of the out-of-memory killer."""
        self.command.kill()

    def options(self, url: str = "") -> list[str]:
        """The options of a run that uses this server."""
        return [
            "--sandbox",
            "remote",
            "--sandbox-url",
            url or self.url,
            "--sandbox-token-file",
            str(self.token),
        ]

    def sandboxes(self) -> list[str]:
        """The directories of the sandboxes that the server has now."""
        place = self.directory / "scratch"
        return [
            entry.name for entry in place.glob("holdwater-*/*") if entry.name not in (".holdwater", "calls")
        ]

    def processes(self) -> list[psutil.Process]:
        """The processes in its sandboxes, by the mark in their environment."""
        identity = self.directory / "identity.json"
        return find_carriers(f"{MARK}={json.loads(identity.read_text())['run']}")

    def assert_clean(self) -> None:
        """Nothing of a sandbox is left."""
        until("all sandboxes are gone", lambda: not self.sandboxes() and not self.processes())

    def close(self) -> None:
        for command in self._commands:
            command.kill()


@contextmanager
def sandbox_server(place: Path, *words: str, **options: Any) -> Iterator[ServedSandboxes]:
    """A server that has been started."""
    served = ServedSandboxes(place, *words, **options)
    try:
        served.start()
        yield served
    finally:
        served.close()


class CutConnection:
    """A proxy on a port of its own, in a thread: its connections can be cut, and refused for a while."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._writers: dict[asyncio.StreamWriter, bool] = {}  # of a connection, and whether a worker made it
        self._closed: set[bool] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="proxy")
        self.passed = 0  # connections so far
        self.bytes = 0  # in both directions

    def cut(self, part: str = "") -> None:
        """Cut the connections of the `conductor`, the `worker` or both, and refuse new ones until `heal`."""
        self._closed = {part == "worker"} if part else {True, False}
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def heal(self) -> None:
        self._closed = set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """End all connections, so that no socket is left to the collector."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._closed = {True, False}
        await self._cut()
        await asyncio.sleep(0.05)  # transports close their sockets in a later step of the loop

    async def _cut(self) -> None:
        for writer, of_worker in self._writers.items():
            if of_worker in self._closed:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            of_worker = b"Holdwater-Gateway: 1" in request
            if of_worker in self._closed:
                raise ConnectionAbortedError
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except (OSError, asyncio.IncompleteReadError):  # or the server is gone
            writer.transport.abort()
            return
        self.passed += 1
        there_writer.write(request)
        self._writers |= {writer: of_worker, there_writer: of_worker}
        ways = [(reader, there_writer), (there_reader, writer)]
        await asyncio.gather(*(self._pump(*way) for way in ways), return_exceptions=True)
        writer.transport.abort()
        there_writer.transport.abort()
        del self._writers[writer], self._writers[there_writer]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while content := await reader.read(65536):
                self.bytes += len(content)
                writer.write(content)
                await writer.drain()
        finally:
            writer.transport.abort()

    def __enter__(self) -> CutConnection:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()
