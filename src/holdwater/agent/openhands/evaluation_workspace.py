"""Lends the attempt's sandbox to an evaluation of the OpenHands benchmarks, as a remote workspace of the SDK.

An evaluation makes a workspace of docker, Apptainer or a remote runtime, and starts a conversation on it, in
which the agent would run. In a thread that has been lent a sandbox, every new remote workspace is the
sandbox. A conversation on it is a local one, whose tools act in the sandbox.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openhands.sdk import Agent, Conversation, LocalConversation, Tool
from openhands.sdk.git.models import GitChange, GitDiff
from openhands.sdk.workspace import RemoteWorkspace
from openhands.sdk.workspace.models import CommandResult, FileOperationResult
from pydantic import PrivateAttr

from ...core.errors import AttemptError, RunFailed
from .settings import WORKER_TOOLS
from .worker_conversation import PREFIX
from .workspace import COMMAND_SECONDS, SandboxWorkspace, ToolSandbox

NO_HOST = "http://sandbox.invalid"  # no server runs in the sandbox


class EvaluationWorkspace(RemoteWorkspace):
    """A `SandboxWorkspace` for code that insists on a remote workspace."""

    _inner: SandboxWorkspace = PrivateAttr()

    def __init__(self, inner: SandboxWorkspace | None = None, **fields: Any) -> None:
        if inner is not None:  # None: the evaluation makes a remote workspace, and has got this one
            super().__init__(host=NO_HOST, working_dir=inner.sandbox.workdir)
            self._inner = inner

    @property
    def inner(self) -> SandboxWorkspace:
        return self._inner

    @property
    def client(self) -> Any:
        message = "the evaluation calls a server in its workspace: a sandbox has none"
        raise RunFailed(message, kind="workspace")

    def execute_command(
        self, command: str, cwd: str | Path | None = None, timeout: float = COMMAND_SECONDS
    ) -> CommandResult:
        return self._inner.execute_command(command, cwd, timeout)

    def file_upload(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        return self._inner.file_upload(source_path, destination_path)

    def file_download(self, source_path: str | Path, destination_path: str | Path) -> FileOperationResult:
        return self._inner.file_download(source_path, destination_path)

    def git_changes(self, path: str | Path) -> list[GitChange]:
        return self._inner.git_changes(path)

    def git_diff(self, path: str | Path) -> GitDiff:
        return self._inner.git_diff(path)

    def pause(self) -> None:
        """Do nothing: a sandbox ends with its attempt."""

    def resume(self) -> None:
        """Do nothing: a sandbox is never paused."""

    def __exit__(self, *error: object) -> None:
        """Do nothing: the sandbox ends with its attempt."""


class EvaluationConversation(LocalConversation):
    """A local conversation with the parameters of a remote one. The run's own limits end it."""

    def run(self, blocking: bool = True, poll_interval: float = 1.0, timeout: float | None = None) -> None:
        super().run()


class LentWorkspace:
    """A sandbox while an evaluation has it."""

    def __init__(self, sandbox: ToolSandbox) -> None:
        self._sandbox = sandbox
        self.workspace = EvaluationWorkspace(SandboxWorkspace(sandbox))
        self.conversations: list[LocalConversation] = []  # bound: those of one evaluation of one instance

    @property
    def failure(self) -> AttemptError | None:
        return self._sandbox.failure


class _LentSandboxes(threading.local):
    """The sandbox that each thread has been lent."""

    current: LentWorkspace | None = None


_lent = _LentSandboxes()


@contextmanager
def lend_workspace(sandbox: Any, mirror: Path) -> Iterator[LentWorkspace]:
    """Lend the sandbox to this thread, as its only remote workspace."""
    install()
    lent = _lent.current = LentWorkspace(ToolSandbox(sandbox, mirror))
    try:
        yield lent
    finally:
        _lent.current = None
        for conversation in lent.conversations:
            with suppress(Exception):  # boundary: a close changes no result
                conversation.close()


def _make_workspace(kind: type[RemoteWorkspace], *arguments: Any, **fields: Any) -> RemoteWorkspace:
    if kind is EvaluationWorkspace or _lent.current is None:
        return object.__new__(kind)
    return _lent.current.workspace


def _make_conversation(kind: type, agent: Any, **options: Any) -> Any:
    workspace = options.get("workspace")
    if not isinstance(workspace, EvaluationWorkspace):
        return _sdk_conversation(kind, agent, **options)
    assert _lent.current is not None, "a workspace is lent to the thread that uses it"
    tools = workspace.inner.sandbox
    options |= {
        "workspace": workspace.inner,
        "callbacks": [*(options.get("callbacks") or ()), tools.check],
        "visualizer": None,  # it would print to the worker's output
    }
    conversation = EvaluationConversation(place_tools(agent), **options)
    _lent.current.conversations.append(conversation)
    return conversation


def place_tools(agent: Any) -> Any:
    """Return the agent with tools that act in the sandbox; the model sees the same names."""
    if not isinstance(agent, Agent):
        message = f"the evaluation's agent is not of the SDK's own kind: `{type(agent).__name__}`"
        raise RunFailed(message, kind="agent")
    for tool in agent.tools:
        if tool.name not in WORKER_TOOLS:
            known = ", ".join(f"`{name}`" for name in WORKER_TOOLS)
            message = f"a tool of the evaluation's agent does not act in a sandbox: `{tool.name}`"
            raise RunFailed(message, f"tools that do are {known}", kind="tool")
    tools = [Tool(name=PREFIX + tool.name, params=tool.params) for tool in agent.tools]
    return agent.model_copy(update={"tools": tools})


def install() -> None:
    """Let the SDK make our workspaces and conversations in threads that have been lent a sandbox."""
    if Conversation.__new__ is not _make_conversation:
        Conversation.__new__ = _make_conversation
        RemoteWorkspace.__new__ = _make_workspace


_sdk_conversation = Conversation.__new__
