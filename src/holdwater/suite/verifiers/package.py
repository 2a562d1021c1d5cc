"""Loads a taskset with the package `verifiers`, in the process that scores its tasks or lists them.

Importing the package takes seconds and about 180 MB: no other module imports it, and this one does so in a
function. `scoring.py` uses what it loads, `lister.py` lists the tasks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import BadInput
from ...plugin import call_guarded, find_module
from .tasks import TaskDescription, TasksetSpec

INSTALL = "pip install verifiers"
MADE_FOR = "0.4"  # the version of the interface


def import_verifiers() -> Any:
    """Import the package; raise BadInput if it is missing or too old."""
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise BadInput(f"the package `verifiers` cannot be imported: {error}", f"`{INSTALL}`") from None
        old = "verifiers" in sys.modules
        problem = "is too old: it has no `verifiers.v1`" if old else "is not installed"
        raise BadInput(f"the package `verifiers` {problem}", f"`{INSTALL}`, beside holdwater") from None


class LoadedTaskset:
    """A taskset, its task class and its environment."""

    def __init__(self, spec: TasksetSpec) -> None:
        self.vf = import_verifiers()
        self._spec = spec
        self._module = self._find_module()
        self.cls = self._find_class()
        config_type = (
            _concrete_type(self.cls, self.vf.TasksetConfig, self.vf.Taskset) or self.vf.TasksetConfig
        )
        self.config = self._validate(config_type, {"id": self._ident, **spec.options})
        self.taskset = call_guarded(lambda: self.cls(self.config), f"taskset `{self.cls.__name__}`")
        self.task_cls = self.cls.task_type()

    def describe_tasks(self) -> Iterator[TaskDescription]:
        """Yield the tasks, lazily: a taskset may have no end."""
        container = bool(self.task_cls.NEEDS_CONTAINER)
        harness = self.vf.default_harness_id("" if self._spec.path is not None else self._ident)
        for task in self.taskset:
            data = task.data.model_dump(mode="json")
            yield TaskDescription(
                data, type(task).__name__, task.key, task.hash, container, self.drives_turns, harness
            )

    def build_task(self, data: Mapping[str, Any]) -> Any:
        """Build a task from its data, as verifiers' own server does."""
        return self.task_cls(self.task_cls.data_type().model_validate(data), self.config.task)

    def list_toolsets(self) -> list[str]:
        """Return the names of the tool servers of the taskset and of its tasks."""
        servers = [*self.cls.toolsets(self.config), *self.task_cls.toolsets(self.config.task)]
        return [server.server_name or type(server).__name__ for server in servers]

    def find_toolsets(self, task: Any) -> tuple[list[Any], list[Any]]:
        """Return the tool servers of the taskset, and those of a task."""
        return list(self.cls.toolsets(self.config)), list(task.toolsets(task.config))

    def check(self) -> None:
        """Raise BadInput if the taskset needs a part of verifiers that only its own runner has."""
        intercepts = self._discover("intercept")
        if intercepts:
            raise BadInput(
                f"taskset `{self.cls.__name__}` rewrites model calls, which are passed on unchanged here:"
                f" `@intercept {intercepts[0]}`"
            )
        if self._spec.env:
            self.check_env()
        elif self.drives_turns:
            self._check_seats()
            if self.env_cls.finalize is not self.vf.Env.finalize:
                module = self._spec.name
                raise BadInput(
                    f"taskset `{self.cls.__name__}` comes with an environment that compares the runs of its"
                    f" agent: `{self.env_cls.__name__}`",
                    f"`vf:{module}?env={module}` compares the samples of a task",
                )

    @property
    def drives_turns(self) -> bool:
        """Whether the exported environment drives the turns of its agent, as a game does."""
        env = self._exported_env
        return (
            env is not None
            and not self._spec.env
            and env.run is not self.vf.SingleAgentEnv.run
            and env.__name__ not in PLAIN
        )

    def list_stops(self) -> list[str]:
        """Return the names of the task's `@stop` predicates."""
        task = self.task_cls.__new__(self.task_cls)
        task.config = self.config.task
        return [stop.__name__ for stop in task.hooks("stop")]

    def check_env(self) -> None:
        """Raise BadInput if the environment does not score the runs of one agent."""
        self._check_seats()
        if self.env_cls.finalize is self.vf.Env.finalize or self.env_cls.__name__ in RUNNERS:
            raise BadInput(
                f"environment `{self.env_cls.__name__}` cannot score samples: its `finalize` does not compare"
                " the runs of one agent"
            )

    def list_seats(self) -> list[str]:
        """Return the names of the environment's agents."""
        return [name for name, field in self.env_config if isinstance(field, self.vf.AgentConfig)]

    def _check_seats(self) -> None:
        if len(seats := self.list_seats()) != 1:
            raise BadInput(
                f"environment `{self.env_cls.__name__}` has {len(seats)} agents: {', '.join(seats)}",
                "only an environment with one agent can be used",
            )

    @cached_property
    def env_cls(self) -> Any:
        """The class of the environment that the spec names, or of the one that the taskset brings."""
        name = self._spec.env
        if self._exported_env is not None and name in ("", self._spec.name, self._ident):
            return self._exported_env
        return call_guarded(lambda: self.vf.environment_class("", name), f"environment `{name}`")

    @cached_property
    def env_config(self) -> Any:
        config_type = _concrete_type(self.env_cls, self.vf.EnvConfig, self.vf.Env) or self.vf.EnvConfig
        return self._validate(config_type, self._spec.env_options)

    def make_env(self) -> Any:
        """Return the environment for its `finalize`: it starts no agents, so that it needs no harness."""
        env = self.env_cls.__new__(self.env_cls)
        env.config, env.taskset = self.env_config, self.taskset
        return env

    def _find_module(self) -> ModuleType:
        if self._spec.path is not None:
            return find_module(str(self._spec.path))
        if self._spec.cls:
            return find_module(self._spec.name)
        found: ModuleType = call_guarded(
            lambda: self.vf.import_taskset(self._spec.name), f"taskset `{self._spec.name}`"
        )
        return found

    def _find_class(self) -> Any:
        if self._spec.cls:
            found = getattr(self._module, self._spec.cls, None)
        else:
            exported = list(self._list_exported(self.vf.Taskset))
            if len(exported) > 1:
                names = ", ".join(f"`{cls.__name__}`" for cls in exported)
                hint = f"name one: `vf:{self._spec.name}:{exported[0].__name__}`"
                raise BadInput(f"`{self._spec.name}` exports several tasksets: {names}", hint)
            found = exported[0] if exported else None
        if not isinstance(found, type) or not issubclass(found, self.vf.Taskset):
            names = ", ".join(f"`{cls.__name__}`" for cls in self._list_exported(self.vf.Taskset))
            wanted = f"no taskset `{self._spec.cls}`" if self._spec.cls else "no taskset in `__all__`"
            hint = f"it exports {names}" if names else "`__all__` must name a subclass of `vf.Taskset`"
            raise BadInput(f"`{self._spec.name}` has {wanted}", hint)
        return found

    @cached_property
    def _exported_env(self) -> Any:
        return next(self._list_exported(self.vf.Env), None)

    def _list_exported(self, base: Any) -> Iterator[Any]:
        for name in getattr(self._module, "__all__", ()):
            found = getattr(self._module, name, None)
            if isinstance(found, type) and issubclass(found, base) and found is not base:
                yield found

    @property
    def _ident(self) -> str:
        return Path(self._spec.name).stem if self._spec.path is not None else self._spec.name

    def _discover(self, mark: str) -> list[str]:
        names = dir(self.task_cls)
        return [name for name in names if getattr(getattr(self.task_cls, name, None), mark, False) is True]

    def _validate(self, config_type: Any, options: Mapping[str, Any]) -> Any:
        from pydantic import ValidationError

        try:
            return config_type.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise BadInput(f"`vf:{self._spec.name}`: option `{field}`: {first['msg']}") from None


# Environments whose `finalize` needs a second runtime of verifiers.
RUNNERS = ("IsolatedVerifierEnv", "HarborEnv")
# Environments that run their agent once and nothing else, unless a task asks for what `tasks.py` refuses.
PLAIN = ("HarborEnv",)


def _concrete_type(cls: Any, base: Any, origin: Any) -> Any:
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(cls, base, origin=origin)
