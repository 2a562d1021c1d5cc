"""From what the user said and what the environment holds to one frozen `RunConfig`.

`environment()` is the only place in holdwater that reads environment variables.
"""

from __future__ import annotations

import fnmatch
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core.authoring import Agent, Suite
from ..core.budget import RunBudget
from ..core.config import Keep, RunConfig, SandboxKind, SandboxRoot
from ..core.endpoint import find_url_problem
from ..core.errors import BadInput
from ..core.helper_environment import KEY_VARIABLES, SERVE_KEYS, SYSTEM_PATH
from ..core.records import Limits, MiB, Record
from ..core.sizes import bytes_of
from ..core.variables import NOT_ALL
from ..gateway.prices import price_of
from ..rollout.models import unpriced
from ..rollout.wire import Provider, Upstream
from ..version import __version__
from ..web.tokens import find_cache, link_directories
from .keys import taken_keys

SCRIPTED = "scripted"
POLICY = "policy:"  # the base URL of a run whose model is a function
OPENAI_URL = "https://api.openai.com/v1"
ANTHROPIC_URL = "https://api.anthropic.com"
GEMINI_URL = "https://generativelanguage.googleapis.com"
MEMORY_REQUEST = "HOLDWATER_MEMORY_REQUEST"  # from a pod's downward API
URL_VARIABLES = {  # of each dialect
    **dict.fromkeys(("chat", "responses", "completions", "embeddings"), "OPENAI_BASE_URL"),
    "messages": "ANTHROPIC_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
}
A_PROCESS = 64 * MiB  # what a conductor or a worker needs before it does anything
DOCKER_SOCKET = "unix:///var/run/docker.sock"


class Environment(Record, frozen=True):
    """What holdwater takes from its environment."""

    openai: Provider | None = None
    anthropic: Provider | None = None
    gemini: Provider | None = None
    path: str = SYSTEM_PATH
    memory_request: int | None = None  # bytes that this pod is sure to get: above it, it can be evicted
    docker_config: Path | None = None  # docker's own `config.json`, with the credentials of registries
    docker_host: str = DOCKER_SOCKET
    cache: Path = Path(tempfile.gettempdir(), "holdwater")  # layers, and what builds know of daemons
    serve_keys: tuple[str, ...] = ()
    token_links: tuple[Path, ...] = ()  # directories in which clients look for the token of a server
    # What workers are started with: everything but keys.
    inherited: dict[str, str] = msgspec.field(default_factory=dict)


def environment() -> Environment:
    env = {**taken_keys(), **os.environ}
    token = env.get("ANTHROPIC_AUTH_TOKEN")
    google = env.get("GEMINI_API_KEY") or env.get("GOOGLE_API_KEY")
    return Environment(
        openai=_provider(env.get("OPENAI_BASE_URL"), env.get("OPENAI_API_KEY"), OPENAI_URL),
        anthropic=_provider(
            env.get("ANTHROPIC_BASE_URL"), token or env.get("ANTHROPIC_API_KEY"), ANTHROPIC_URL, bool(token)
        ),
        gemini=_provider(env.get("GOOGLE_GEMINI_BASE_URL"), google, GEMINI_URL),
        path=env.get("PATH") or SYSTEM_PATH,
        memory_request=_request(env.get(MEMORY_REQUEST)),
        docker_config=_docker_config(env),
        docker_host=env.get("DOCKER_HOST") or DOCKER_SOCKET,
        cache=find_cache(env),
        serve_keys=tuple(key.strip() for key in env.get(SERVE_KEYS, "").split(",") if key.strip()),
        token_links=tuple(link_directories(env)),
        inherited={name: value for name, value in env.items() if name not in KEY_VARIABLES},
    )


def upstream_of(config: RunConfig, env: Environment) -> Upstream | None:
    """Where the run's model calls go; None for a run without a model.

    An explicit base URL is asked in every dialect; otherwise each dialect goes to its provider.
    """
    if config.model is None or config.replays is not None:
        return None
    if config.base_url == POLICY:
        raise BadInput("the run's model is a Python function", "give it again: `hw.resume(path, policy=...)`")
    if config.base_url is not None:
        key = env.openai.key if env.openai else None
        return Upstream(everywhere=Provider(url=config.base_url.rstrip("/"), key=key))
    providers = {
        "OPENAI_BASE_URL": env.openai,
        "ANTHROPIC_BASE_URL": env.anthropic,
        "GOOGLE_GEMINI_BASE_URL": env.gemini,
    }
    spoken = {dialect: found for dialect, name in URL_VARIABLES.items() if (found := providers[name])}
    if not spoken:
        raise BadInput(
            f"model `{config.model}` has no upstream",
            "set `OPENAI_API_KEY`, or `OPENAI_BASE_URL` for another server",
        )
    for dialect, provider in spoken.items():
        if problem := find_url_problem(provider.url):
            raise BadInput(
                f"`{URL_VARIABLES[dialect]}` {problem}", "the key belongs into a variable of its own"
            )
    return Upstream(spoken=spoken)


def _elsewhere() -> str | None:
    """The base URL that the environment names, if that is not the makers' own: prices there are others."""
    openai = environment().openai
    return openai.url if openai is not None and openai.url != OPENAI_URL else None


def _docker_config(env: Mapping[str, str]) -> Path | None:
    place = env.get("DOCKER_CONFIG") or (f"{env['HOME']}/.docker" if env.get("HOME") else "")
    return Path(place, "config.json") if place else None


def _request(said: str | None) -> int | None:
    return parse_bytes(said, MEMORY_REQUEST) if said else None


def _provider(url: str | None, key: str | None, default: str, bearer: bool = False) -> Provider | None:
    if not url and not key:
        return None
    return Provider(url=(url or default).rstrip("/"), key=key or None, bearer=bearer)


def build(suite: Suite, agent: Agent, named: tuple[str, str], options: dict[str, Any]) -> RunConfig:
    """The run's configuration: what the user said, what the suite suggests, our defaults, in that order."""
    suggested = suite.defaults
    said = {name: value for name, value in options.items() if value is not None}
    said.setdefault("attempts", suggested.attempts or 1)
    said.setdefault("workers", os.cpu_count() or 1)
    said.setdefault("sandbox", SandboxKind(suggested.sandbox or SandboxKind.PROCESS))
    limits = said.pop("limits", Limits())
    if suggested.timeout is not None and limits.acting == Limits().acting:
        limits = msgspec.structs.replace(limits, acting=suggested.timeout)
    if said.get("model") is None and suggested.model is not None and agent.uses_model:
        said["model"] = suggested.model
    prices = said.pop("prices", {})
    if said.get("model") is not None:
        said["price"] = price_of(said["model"], prices, said.get("base_url") or _elsewhere())
    config = RunConfig(
        id=secrets.token_hex(8),
        suite=named[0],
        agent=named[1],
        created=time.time(),
        version=__version__,
        limits=limits,
        **said,
    )
    check(config)
    return config


def replaying(config: RunConfig, run: Path, only: Sequence[str]) -> RunConfig:
    """The configuration of a run that is given the recorded replies of `run`, which has `config`."""
    return msgspec.structs.replace(
        config,
        id=secrets.token_hex(8),
        created=time.time(),
        version=__version__,
        replays=str(run.absolute()),
        serving=None,
        base_url=None,
        only=tuple(only),
        limit=None,
        shard=None,
        budget=RunBudget(),
        keep=Keep.ALL,
        rpm=None,
        tpm=None,
    )


def check(config: RunConfig) -> None:
    """Refuse what can never work, by the name that the user gave it."""
    least = {"concurrency": 1, "workers": 0, "attempts": 1, "retries": 0, "samples": 1, "recycle_after": 1}
    for name, lowest in least.items():
        if (getattr(config, name) or lowest) < lowest or getattr(config, name) == 0 < lowest:
            raise BadInput(f"`--{name.replace('_', '-')}` must be at least {lowest}: {getattr(config, name)}")
    least_memory = (1 + config.workers) * A_PROCESS
    if config.memory is not None and config.memory < least_memory:
        needs = f"{least_memory // MiB} MiB for a conductor and {config.workers} workers"
        raise BadInput(f"`--memory` must be at least {needs}: {config.memory // MiB} MiB")
    if config.limit is not None and config.limit < 1:
        raise BadInput(f"`--limit` must be at least 1: {config.limit}")
    if config.shard is not None and not 1 <= config.shard[0] <= config.shard[1]:
        raise BadInput(f"`--shard` must be i/n with 1 <= i <= n: {config.shard[0]}/{config.shard[1]}")
    if config.base_url not in (None, POLICY) and (problem := find_url_problem(config.base_url)):
        raise BadInput(f"`--base-url` {problem}", "the key belongs into `OPENAI_API_KEY`")
    check_containers(config)
    for name in ("setup", "acting", "grading"):
        if getattr(config.limits, name) <= 0:
            raise BadInput(f"the limit for {name} must be more than 0 s: {getattr(config.limits, name):g}")
    for name in ("memory", "disk", "cpus", "cpu_seconds", "pids", "output"):
        value = getattr(config.limits, name)
        if value is not None and value <= 0:
            raise BadInput(f"`--sandbox-{name.replace('_', '-')}` must be more than 0: {value:g}")
    check_spending(config)


def check_containers(config: RunConfig) -> None:
    """Refuse what only containers have, where there are none."""
    given = {
        "--image": config.image,
        "--images": config.images,
        "--sandbox-read-only": config.read_only,
    }
    for flag, value in given.items():
        if value and config.sandbox is not SandboxKind.DOCKER:
            raise BadInput(f"`{flag}` is for containers", "add `--sandbox docker`")
    if config.sandbox_root is SandboxRoot.HOST and config.sandbox is SandboxKind.DOCKER:
        raise BadInput("`--sandbox-root host` is for process sandboxes", "show what is needed by `--mount`")


def check_spending(config: RunConfig) -> None:
    """Refuse budgets and rates that nothing could be done with, or that nobody could keep."""
    limits, budget = config.limits, config.budget
    given = {
        "--max-requests": limits.requests,
        "--max-input-tokens": limits.input_tokens,
        "--max-output-tokens": limits.output_tokens,
        "--max-cost": limits.cost,
        "--run-requests": budget.requests,
        "--run-tokens": budget.tokens,
        "--run-cost": budget.cost,
        "--run-time": budget.seconds,
        "--disk": config.disk,
        "--rpm": config.rpm,
        "--tpm": config.tpm,
    }
    for flag, value in given.items():
        if value is not None and value <= 0:
            raise BadInput(f"`{flag}` must be more than 0: {value:g}")
    if (limits.cost is not None or budget.cost is not None) and config.model and config.price is None:
        error = unpriced(config.model)
        raise BadInput(error.message, error.hint)


def check_variables(suite: Suite, config: RunConfig, env: Environment) -> None:
    """Refuse a suite of which a chosen instance asks for a variable that is not handed over, or not set."""
    for need in suite.needs() if suite.needs is not None else ():
        name = need.variable
        if config.only and not any(fnmatch.fnmatchcase(need.instance, only) for only in config.only):
            continue
        if name in KEY_VARIABLES:
            raise BadInput(f"{need.place}: the variable `{name}` is not handed over", NOT_ALL)
        if name not in config.pass_env:
            raise BadInput(
                f"{need.place}: the variable `{name}` is not handed over", f"`--pass-env {name}` allows it"
            )
        if name not in env.inherited:
            raise BadInput(f"{need.place}: the variable `{name}` is not set", "set it")


def passed_variables(config: RunConfig, env: Environment) -> dict[str, str]:
    """The variables of the operator's environment that instances may ask for."""
    return {name: env.inherited[name] for name in config.pass_env if name in env.inherited}


def default_directory(suite: str) -> Path:
    """`runs/<time>-<suite>-<random>`, in the current directory: starts in the same second do not collide."""
    stem = Path(suite.split(":")[0]).stem if "/" in suite or "." in suite else suite.split(":")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(3)}"


def parse_bytes(text: str, flag: str) -> int:
    """`512MiB`, `8GiB`, `1.5g`, `1000000`: a number of bytes."""
    if (found := bytes_of(text)) is None:
        raise BadInput(f"`{flag}` is no size: `{text}`", "for example `512MiB` or `8GiB`")
    return found


def parse_sampling(pairs: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """`temperature=0.7`: a parameter and its value, as JSON where it is that and as text otherwise."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise BadInput(f"`--sampling` must look like `temperature=0.7`: `{pair}`")
        try:
            found[name.strip()] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            found[name.strip()] = text
    return found


def parse_pass_env(names: Sequence[str]) -> tuple[str, ...]:
    """Names of variables; keys of providers, and of a server, are refused."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise BadInput(f"invalid name for `--pass-env`: `{name}`")
        if name in KEY_VARIABLES:
            raise BadInput(f"invalid name for `--pass-env`: `{name}`", NOT_ALL)
    return tuple(dict.fromkeys(names))


def parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise BadInput(f"`--shard` must look like `1/4`: `{text}`")
    return int(match[1]), int(match[2])
