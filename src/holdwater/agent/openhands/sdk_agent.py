"""The agent `openhands-sdk`: where its conversations run, what is checked before, and how they end.

Without the option `python` they run in threads of the worker, and their tools act in the sandboxes. With it
each runs in its sandbox, by that interpreter. `settings.py` has the options.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Agent, Model, Sandbox
from ...core.errors import AgentFailed, BadInput, LimitReached
from ...core.records import Instance, MiB
from ...evaluation import SDK_VARIABLES, set_sdk_variables
from ...plugin import call_guarded
from .. import command
from ..client_preset import describe_range, explain_version
from .settings import SdkSettings, parse_settings, read_system_prompt

NAME = "openhands-sdk"
PACKAGES = ("openhands-sdk", "openhands-tools")
TESTED = ("1.21.0", "1.58.0")
INSTALL = "uv pip install openhands-sdk==1.58.0 openhands-tools==1.58.0"
INSTEAD = "; or name an interpreter: `--agent-option python=PATH`"
# Estimates, above three terminals that peaked at 8 MB each; a lease corrects them by use.
TERMINAL_MEMORY = 24 * MiB  # in the sandbox of a conversation that runs in the worker
CONVERSATION_MEMORY = 8 * MiB  # in the worker
PROCESS_MEMORY = 300 * MiB  # in the sandbox of a conversation that runs there
MAX_ITERATIONS = "MaxIterationsReached"  # the SDK's code


def openhands_sdk() -> Agent:
    return _make_agent({})


def _make_agent(options: Mapping[str, Any]) -> Agent:
    settings = parse_settings(options)
    prompt = read_system_prompt(settings)
    given = {name: getattr(settings, name) for name in options}
    described = f"an agent of the OpenHands SDK; tested: {describe_range(TESTED)}; `{INSTALL}`"
    common: dict[str, Any] = {
        "name": NAME,
        "needs_model": True,
        "description": described,
        "configure": _make_agent,
        "options": given,
    }
    if settings.python is None:
        conversations = WorkerConversations(settings, prompt)
        return Agent(
            act=conversations.act,
            check=check_packages,
            prepare=conversations.prepare,
            notes=_find_notes(),
            memory=TERMINAL_MEMORY,
            worker_memory=CONVERSATION_MEMORY,
            **common,
        )
    return Agent(
        act=_SandboxConversation(settings, prompt),
        check=partial(command.check_program, settings.python, INSTALL),
        paths=command.find_paths(settings.python),
        memory=PROCESS_MEMORY,
        **common,
    )


class WorkerConversations:
    """Runs conversations in threads of this process."""

    def __init__(self, settings: SdkSettings, prompt: str | None) -> None:
        self._settings = settings
        self._prompt = prompt
        self._place: Path | None = None  # of the SDK's own files, and of those that its editor edits

    def prepare(self, place: Path) -> None:
        """Import the SDK; `place` gets its files."""
        self._place = place
        import_sdk(place)

    def act(self, instance: Instance, sandbox: Sandbox, model: Model) -> str:
        if self._place is None:  # a child of another agent
            self.prepare(Path(tempfile.mkdtemp()))
        assert self._place is not None
        from .worker_conversation import converse

        job = _make_job(self._settings, self._prompt, instance, model, model.url)
        return _read_end(converse(sandbox, job, model.key, self._place), self._settings)


class _SandboxConversation:
    """Runs conversations in their sandboxes, by the interpreter that the settings name."""

    def __init__(self, settings: SdkSettings, prompt: str | None) -> None:
        self._settings = settings
        self._prompt = prompt

    async def __call__(self, instance: Instance, sandbox: Sandbox, model: Model) -> str:
        settings = self._settings
        assert settings.python is not None
        program, job = (f"{sandbox.private}/openhands-{name}" for name in ("conversation.py", "job.json"))
        await sandbox.write(program, Path(__file__).with_name("conversation.py").read_bytes())
        content = _make_job(settings, self._prompt, instance, model, model.sandbox_url)
        await sandbox.write(job, msgspec.json.encode(content))
        env = {**SDK_VARIABLES, "OPENAI_API_KEY": model.key}
        result = await command.run_program(
            settings.python, [settings.python, program, job], sandbox, env, INSTALL
        )
        last = result.stdout.rstrip().rpartition("\n")[2]
        try:
            end = msgspec.json.decode(last, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise AgentFailed(f"the conversation printed no result: {last[-500:]}", kind="result") from None
        return _read_end(end, settings)


def _make_job(
    settings: SdkSettings, prompt: str | None, instance: Instance, model: Model, url: str
) -> dict[str, Any]:
    """Return the job of `conversation.py`. The same instance and round have the same id, for a resume."""
    name = f"{instance.id}/{getattr(model, 'seed', 0)}"
    return {
        **msgspec.structs.asdict(settings),
        "tool_names": settings.tool_names,
        "prompt": prompt,
        "id": str(uuid.uuid5(uuid.NAMESPACE_OID, name)),
        "instruction": instance.instruction,
        "model": model.name,
        "url": url,
    }


def _read_end(end: Mapping[str, Any], settings: SdkSettings) -> str:
    """Return the answer of a finished conversation; raise the failure of another one."""
    if end["status"] == "finished":
        return str(end["answer"])
    if end["code"] == MAX_ITERATIONS:
        raise LimitReached(f"not done after {settings.max_iterations} iterations", kind="turns")
    if end["status"] == "stuck":
        raise AgentFailed("the conversation is stuck: its last actions repeat", kind="stuck")
    problem = f"{end['code']}: {end['detail']}" if end["code"] else f"it is {end['status']}"
    raise AgentFailed(f"the conversation did not finish: {problem}", kind="conversation")


def import_sdk(place: Path) -> None:
    """Import the SDK, with the variables that it reads at that time; `place` gets its files."""
    # Plug-ins and profiles of the user's home would change the conversations.
    set_sdk_variables({"OH_PERSISTENCE_DIR": str(place / "home")})
    module = f"{__package__}.worker_conversation"
    call_guarded(lambda: importlib.import_module(module), f"agent `{NAME}`")


def check_packages(subject: str = f"agent `{NAME}`", instead: str = INSTEAD) -> None:
    """Raise BadInput if this interpreter cannot run conversations of the SDK."""
    hint = f"`{INSTALL}` with Python 3.12 or newer{instead}"
    for package in PACKAGES:
        if _find_version(package) is None:
            raise BadInput(f"{subject} needs the package `{package}` beside holdwater", hint)


def _find_version(package: str) -> str | None:
    from importlib import metadata  # a slow import, for which few runs have a use

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _find_notes() -> tuple[str, ...]:
    """Return a note if the installed version is not a tested one."""
    version = _find_version(PACKAGES[0])
    if version is None:
        return ()
    told = explain_version(PACKAGES[0], TESTED, version)
    return (told,) if told else ()
