"""Tasks of verifiers as plain data: the spec that names a taskset, and the instance of each task.

It does not import verifiers: the conductor and a server build instances from the data alone. `package.py`
loads the taskset itself, in the process that scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ...core.errors import BadInput
from ...core.records import GiB, Instance, LimitOverrides, Network, Record, SandboxSpec

PREFIX = "vf:"
TASK = "task"  # the key in an instance's data
HARBOR_FIELD = "task_dir"  # only tasks of Harbor have it, whose tests use these directories:
HARBOR_DIRECTORIES = ("/tests", "/logs/agent", "/logs/verifier", "/logs/artifacts")
COMPOSE_FILE = "environment/docker-compose.yaml"
OWN_OPTIONS = ("env", "pass")  # all others configure the taskset, or the environment (`env.NAME`)


class TasksetSpec(Record, frozen=True):
    """`vf:MODULE[:CLASS]` or `vf:PATH[:CLASS]`, with options after a `?`."""

    name: str  # a module, or the path of a file or a package directory
    cls: str = ""  # the name of the taskset's class; empty: the one that the module exports
    options: dict[str, Any] = msgspec.field(default_factory=dict)  # of the taskset's configuration
    env: str = ""  # the module of an environment whose `finalize` scores the samples of a task
    env_options: dict[str, Any] = msgspec.field(default_factory=dict)
    passing: float = 1.0  # the reward from which a task counts as passed

    @property
    def path(self) -> Path | None:
        """The file or directory, if it is not a module's name."""
        return Path(self.name) if "/" in self.name or self.name.endswith(".py") else None


class TaskDescription(Record, frozen=True):
    """A task, as `instance.data` has it. Type, key and hash are missing if only its data is known."""

    data: dict[str, Any]
    type: str = ""
    key: str = ""
    hash: str = ""
    container: bool = False  # it needs a container
    opened: bool = False  # its environment opens the conversation, so that it needs no prompt
    harness: str = "bash"  # the harness that its package suggests
    source: str = ""  # the spec of the environment of verifiers 0.1 that has it


class TasksetFacts(Record, frozen=True):
    """Facts about a taskset that a run needs before it starts."""

    name: str
    toolsets: tuple[str, ...] = ()  # names of its tool servers
    stops: tuple[str, ...] = ()  # names of its `@stop` predicates
    player: str = ""  # the environment that drives the agent's turns


def parse_spec(spec: str) -> TasksetSpec:
    """Parse the spec of a taskset; raise BadInput if it is invalid."""
    place, _, query = spec.removeprefix(PREFIX).partition("?")
    name, _, cls = place.partition(":")
    if not name:
        raise BadInput(f"missing module: `{spec}`", "for example `vf:gsm8k` or `vf:./my_env/taskset.py`")
    options: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        _put_option(options, key.split("."), _parse_value(text), spec)
    env, passing = options.pop("env", {}), options.pop("pass", 1.0)
    if not isinstance(passing, int | float) or isinstance(passing, bool):
        raise BadInput(f"`{spec}`: option `pass` must be a number: `{passing}`")
    env = env if isinstance(env, dict) else {"id": env}
    ident = str(env.pop("id", ""))
    if env and not ident:
        raise BadInput(f"`{spec}`: options of an environment need its name", "for example `env=best-of-n`")
    return TasksetSpec(name, cls, options, ident, env, float(passing))


def make_absolute(spec: str) -> str:
    """Return the spec with an absolute path, if it has a path."""
    place, mark, query = spec.removeprefix(PREFIX).partition("?")
    name, colon, cls = place.partition(":")
    path = TasksetSpec(name).path
    return f"{PREFIX}{path.absolute() if path is not None else name}{colon}{cls}{mark}{query}"


def name_task(data: Mapping[str, Any]) -> str:
    """Return the id of a task's instance: its position in the taskset, then its own id or name."""
    index, label = data.get("idx"), data.get("id") or data.get("name")
    label = "".join(c if c.isprintable() else " " for c in str(label))[:200] if label else ""
    return "-".join(part for part in ("" if index is None else str(index), label) if part) or "task"


def make_instance(task: TaskDescription) -> Instance:
    """Return the instance of a task, with its limits and its sandbox."""
    data = task.data
    described = msgspec.to_builtins(task)
    if reason := _find_refusal(data, task.opened):
        return Instance(id=name_task(data), data={TASK: described}, refused=reason)
    return Instance(
        id=name_task(data),
        instruction=render_prompt(data),
        data={TASK: described},
        limits=_derive_limits(data),
        start=SandboxSpec(
            image=data.get("image"),
            workdir=data.get("workdir") or None,
            user=data.get("agent_user"),
            network=Network.GATEWAY if data.get("network_allow") == [] else None,
            directories=HARBOR_DIRECTORIES if HARBOR_FIELD in data else (),
            processes=not (task.container or data.get("image")),
        ),
    )


def read_task(instance: Instance) -> TaskDescription:
    """Return the task of an instance."""
    return msgspec.convert(instance.data[TASK], TaskDescription)


def render_prompt(data: Mapping[str, Any]) -> str:
    """Return the system prompt and the prompt as one text, for an agent that takes a text."""
    prompt = data.get("prompt")
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt or []
    texts = [data.get("system_prompt") or "", *(_read_text(message.get("content")) for message in messages)]
    return "\n\n".join(text for text in texts if text)


def _read_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [] if part.get("type") == "text")


def _find_refusal(data: Mapping[str, Any], opened: bool) -> str:
    """Return the field of a task that no sandbox here can implement, and why; empty: all can be."""
    if data.get("prompt") is None and not opened:
        return "field `prompt`: missing, and the user who would open the conversation is not supported"
    if data.get("network_allow", ["*"]) not in ([], ["*"]):
        return "field `network_allow`: a sandbox has no filter for hosts"
    if data.get("network_block"):
        return "field `network_block`: a sandbox has no filter for hosts"
    if (data.get("resources") or {}).get("gpu"):
        return "field `resources.gpu`: a sandbox has no GPU"
    if data.get("verifier"):
        return "field `verifier`: a verifier in a sandbox of its own is not supported"
    if HARBOR_FIELD in data and Path(data[HARBOR_FIELD], COMPOSE_FILE).exists():
        return f"file `{COMPOSE_FILE}`: Compose services are not supported"
    if data.get("skills"):
        return "field `skills`: agents are not given skills"
    if (workdir := data.get("workdir")) and not str(workdir).startswith("/"):
        return f"field `workdir`: not an absolute path: `{workdir}`"
    return ""


def _derive_limits(data: Mapping[str, Any]) -> LimitOverrides:
    timeout, resources = data.get("timeout") or {}, data.get("resources") or {}
    scoring = timeout.get("scoring")
    return LimitOverrides(
        setup=timeout.get("setup"),
        acting=timeout.get("agent"),
        grading=None if scoring is None else scoring + (timeout.get("finalize") or 0.0),
        cpus=resources.get("cpu"),
        memory=_to_bytes(resources.get("memory")),
        disk=_to_bytes(resources.get("disk")),
    )


def _to_bytes(size: float | None) -> int | None:
    return None if size is None else int(size * GiB)


def _put_option(options: dict[str, Any], names: list[str], value: Any, spec: str) -> None:
    *outer, last = names
    for name in outer:
        found = options.setdefault(name, {})
        if not isinstance(found, dict):
            found = options[name] = {"id": found}  # `env=NAME` beside `env.OPTION=...`
        options = found
    if isinstance(options.get(last), dict):
        options[last]["id"] = value
        return
    if last in options:
        raise BadInput(f"`{spec}`: option given twice: `{'.'.join(names)}`")
    options[last] = value


def _parse_value(text: str) -> Any:
    """Return a value as JSON, or the text if it is none."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text
