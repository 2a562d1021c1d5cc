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
from urllib.parse import urlsplit

import msgspec

from ..core.authoring import Agent, Suite
from ..core.budget import RunBudget
from ..core.config import Keep, RunConfig, SandboxKind
from ..core.errors import BadInput
from ..core.records import Limits, MiB, Record
from ..core.sizes import bytes_of
from ..core.variables import NOT_ALL
from ..gateway.prices import price_of
from ..rollout.models import unpriced
from ..rollout.wire import Provider, Upstream
from ..version import __version__

SCRIPTED = "scripted"
POLICY = "policy:"  # the base URL of a run whose model is a function
OPENAI_URL = "https://api.openai.com/v1"
ANTHROPIC_URL = "https://api.anthropic.com"
GEMINI_URL = "https://generativelanguage.googleapis.com"
PROVIDER_KEYS = {
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "GEMINI_API_KEY",
    "GOOGLE_API_KEY",
}
MEMORY_REQUEST = "HOLDWATER_MEMORY_REQUEST"  # from a pod's downward API
A_PROCESS = 64 * MiB  # what a conductor or a worker needs before it does anything
SERVE_KEYS = "HOLDWATER_SERVE_KEYS"  # that open a server, with commas between them
DOCKER_SOCKET = "unix:///var/run/docker.sock"
CACHE = "HOLDWATER_CACHE"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Environment(Record, frozen=True):
    """What holdwater takes from its environment."""

    openai: Provider | None = None
    anthropic: Provider | None = None
    gemini: Provider | None = None
    path: str = DEFAULT_PATH
    memory_request: int | None = None  # bytes that this pod is sure to get: above it, it can be evicted
    docker_config: Path | None = None  # docker's own `config.json`, with the credentials of registries
    docker_host: str = DOCKER_SOCKET
    cache: Path = Path(tempfile.gettempdir(), "holdwater")  # layers, and what builds know of daemons
    serve_keys: tuple[str, ...] = ()
    # What workers are started with: everything but keys.
    inherited: dict[str, str] = msgspec.field(default_factory=dict)


def environment() -> Environment:
    env = os.environ
    token = env.get("ANTHROPIC_AUTH_TOKEN")
    google = env.get("GEMINI_API_KEY") or env.get("GOOGLE_API_KEY")
    return Environment(
        openai=_provider(env.get("OPENAI_BASE_URL"), env.get("OPENAI_API_KEY"), OPENAI_URL),
        anthropic=_provider(
            env.get("ANTHROPIC_BASE_URL"), token or env.get("ANTHROPIC_API_KEY"), ANTHROPIC_URL, bool(token)
        ),
        gemini=_provider(env.get("GOOGLE_GEMINI_BASE_URL"), google, GEMINI_URL),
        path=env.get("PATH") or DEFAULT_PATH,
        memory_request=_request(env.get(MEMORY_REQUEST)),
        docker_config=_docker_config(env),
        docker_host=env.get("DOCKER_HOST") or DOCKER_SOCKET,
        cache=_cache(env),
        serve_keys=tuple(key.strip() for key in env.get(SERVE_KEYS, "").split(",") if key.strip()),
        inherited={name: value for name, value in env.items() if name not in {*PROVIDER_KEYS, SERVE_KEYS}},
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
    openai = dict.fromkeys(("chat", "responses", "completions", "embeddings"), env.openai)
    providers = {**openai, "messages": env.anthropic, "gemini": env.gemini}
    spoken = {dialect: provider for dialect, provider in providers.items() if provider is not None}
    if not spoken:
        raise BadInput(
            f"model `{config.model}` has no upstream",
            "set `OPENAI_API_KEY`, or `OPENAI_BASE_URL` for another server",
        )
    return Upstream(spoken=spoken)


def _elsewhere() -> str | None:
    """The base URL that the environment names, if that is not the makers' own: prices there are others."""
    openai = environment().openai
    return openai.url if openai is not None and openai.url != OPENAI_URL else None


def _docker_config(env: Mapping[str, str]) -> Path | None:
    place = env.get("DOCKER_CONFIG") or (f"{env['HOME']}/.docker" if env.get("HOME") else "")
    return Path(place, "config.json") if place else None


def _cache(env: Mapping[str, str]) -> Path:
    if said := env.get(CACHE):
        return Path(said).absolute()
    home = env.get("XDG_CACHE_HOME") or f"{env.get('HOME') or tempfile.gettempdir()}/.cache"
    return Path(home, "holdwater")


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
    address = urlsplit(config.base_url or "")
    if address.username or address.password or address.query:
        raise BadInput(
            f"`--base-url` must hold no key and no query: `{address.hostname or ''}{address.path}`",
            "the key belongs into `OPENAI_API_KEY`: what is in the URL would be kept in the run's files",
        )
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
    """Refuse a suite of which a chosen instance asks for a variable that is not set."""
    for need in suite.needs() if suite.needs is not None else ():
        chosen = not config.only or any(fnmatch.fnmatchcase(need.instance, only) for only in config.only)
        if chosen and need.variable not in env.inherited:
            raise BadInput(f"{need.place}: the variable `{need.variable}` is not set", f"set it; {NOT_ALL}")


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


def parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise BadInput(f"`--shard` must look like `1/4`: `{text}`")
    return int(match[1]), int(match[2])
