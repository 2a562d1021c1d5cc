"""Builds one frozen `RunConfig` from the user's options and the environment.

`read_environment` is the only place in holdwater that reads environment variables.
"""

from __future__ import annotations

import fnmatch
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Agent, Suite
from ...core.config import AUTO_DIALECT, SAME_DIALECT, KeepRule, RunConfig, SandboxRoot, ServingConfig
from ...core.endpoints import BaseUrl, check_endpoints, find_first_url, list_endpoint_keys, list_endpoints
from ...core.environment import JUDGE_KEY, KEYS_WITHHELD, SANDBOX_TOKEN, SERVE_KEYS, SYSTEM_PATH
from ...core.errors import BadInput
from ...core.fork_origin import ForkOrigin
from ...core.input_checks import find_url_problem
from ...core.judge import JudgeModel
from ...core.limits import parse_size
from ...core.options import list_options
from ...core.prices import RunBudget, make_price_error
from ...core.records import Limits, MiB, Record
from ...core.sandbox_protocol import RemoteAddress
from ...dialect import CHAT, DIALECTS, list_key_variables, list_providers
from ...dialect.interface import ProviderVariables
from ...gateway.prices import price_of
from ...rollout.sandbox_kinds import find_kind
from ...rollout.worker_protocol import ModelProvider, UpstreamConfig
from ...version import __version__
from ...web.tokens import find_cache, list_link_directories
from .keys import read_taken_keys

SCRIPTED = "scripted"
POLICY_URL = "policy:"  # the base URL of a run whose model is a function
MEMORY_REQUEST = "HOLDWATER_MEMORY_REQUEST"  # from a pod's downward API
CACHE_SIZE = "HOLDWATER_CACHE_SIZE"
PROCESS_MEMORY = 64 * MiB  # the least memory of a conductor or a worker
DOCKER_SOCKET = "unix:///var/run/docker.sock"


class ProcessEnvironment(Record, frozen=True):
    """The values that holdwater takes from its environment."""

    providers: dict[str, ModelProvider] = msgspec.field(default_factory=dict)  # by their URL variable
    path: str = SYSTEM_PATH
    memory_request: int | None = None  # bytes guaranteed to this pod: above it, it can be evicted
    docker_config: Path | None = None  # docker's own `config.json`, with the credentials of registries
    docker_host: str = DOCKER_SOCKET
    cache: Path = Path(tempfile.gettempdir(), "holdwater")  # layers, and the state of builds on daemons
    cache_size: int | None = None  # bytes of layers, and of images on a daemon, that may stay
    serve_keys: tuple[str, ...] = ()
    judge_key: str | None = None
    sandbox_token: str | None = None  # of a sandbox server
    token_links: tuple[Path, ...] = ()  # directories in which clients look for the token of a server
    # The environment of workers: everything but keys.
    inherited: dict[str, str] = msgspec.field(default_factory=dict)


def read_environment(base_url: BaseUrl | None = None) -> ProcessEnvironment:
    """Read the environment. The keys of the servers of `base_url` are withheld from workers, too."""
    env = {**read_taken_keys(), **os.environ}
    keys = list_key_variables().union(list_endpoint_keys(base_url))
    return ProcessEnvironment(
        providers={names.url: found for names in list_providers() if (found := _find_provider(names, env))},
        path=env.get("PATH") or SYSTEM_PATH,
        memory_request=_parse_variable(env, MEMORY_REQUEST),
        docker_config=_find_docker_config(env),
        docker_host=env.get("DOCKER_HOST") or DOCKER_SOCKET,
        cache=find_cache(env),
        cache_size=_parse_variable(env, CACHE_SIZE),
        serve_keys=tuple(key.strip() for key in env.get(SERVE_KEYS, "").split(",") if key.strip()),
        judge_key=env.get(JUDGE_KEY) or None,
        sandbox_token=env.get(SANDBOX_TOKEN, "").strip() or None,
        token_links=tuple(list_link_directories(env)),
        inherited={name: value for name, value in env.items() if name not in keys},
    )


def read_key_variables(names: Iterable[str]) -> dict[str, str]:
    """Return the keys in these variables; raise `BadInput` for one that is not set."""
    env = {**read_taken_keys(), **os.environ}
    for name in names:
        if not env.get(name):
            raise BadInput(f"the variable is not set: `{name}`", f"`export {name}=...`")
    return {name: env[name] for name in names}


def find_upstream(config: RunConfig, env: ProcessEnvironment) -> UpstreamConfig | None:
    """Return where the run's model calls go; None for a run without a model.

    An explicit base URL serves every dialect; otherwise each dialect goes to its provider.
    """
    if config.model is None or config.replays is not None:
        return None
    if config.base_url == POLICY_URL:
        raise BadInput("the run's model is a Python function", "pass it again: `policy=...`")
    if config.base_url is not None:
        return UpstreamConfig(everywhere=_list_servers(config.base_url, env))
    spoken = {
        name: env.providers[dialect.provider.url]
        for name, dialect in DIALECTS.items()
        if dialect.provider.url in env.providers
    }
    if not spoken:
        raise BadInput(
            f"no server is known for model `{config.model}`",
            "set `OPENAI_API_KEY`, or `OPENAI_BASE_URL` for another server",
        )
    for variable, provider in env.providers.items():
        if problem := find_url_problem(provider.url):
            raise BadInput(f"`{variable}` {problem}", "put the key into its own variable")
    return UpstreamConfig(spoken=spoken)


def _list_servers(base_url: BaseUrl, env: ProcessEnvironment) -> tuple[ModelProvider, ...]:
    """Return the servers with their keys: each that of its own variable, or the run's."""
    openai = env.providers.get(CHAT.provider.url)
    keys = read_key_variables(list_endpoint_keys(base_url))
    return tuple(
        ModelProvider(
            url=server.url.rstrip("/"),
            key=keys[server.key] if server.key is not None else openai.key if openai else None,
            weight=server.weight,
            models=server.models,
        )
        for server in list_endpoints(base_url)
    )


def add_judge(
    upstream: UpstreamConfig | None, config: RunConfig, env: ProcessEnvironment
) -> UpstreamConfig | None:
    """Return the upstream with the judges' own server, if the run has one."""
    if config.judge.url is None or config.replays is not None:
        return upstream
    judge = ModelProvider(url=config.judge.url.rstrip("/"), key=env.judge_key)
    return msgspec.structs.replace(upstream or UpstreamConfig(), judge=judge)


def _find_other_url() -> str | None:
    """Return the environment's base URL unless it is the provider's own: other servers have other prices."""
    openai = read_environment().providers.get(CHAT.provider.url)
    return openai.url if openai is not None and openai.url != CHAT.provider.default_url else None


def _find_docker_config(env: Mapping[str, str]) -> Path | None:
    place = env.get("DOCKER_CONFIG") or (f"{env['HOME']}/.docker" if env.get("HOME") else "")
    return Path(place, "config.json") if place else None


def _parse_variable(env: Mapping[str, str], name: str) -> int | None:
    return parse_bytes(env[name], name) if env.get(name) else None


def _find_provider(names: ProviderVariables, env: Mapping[str, str]) -> ModelProvider | None:
    url, token = env.get(names.url), env.get(names.bearer)
    key = token or next(filter(None, map(env.get, names.keys)), None)
    if not url and not key:
        return None
    return ModelProvider(url=(url or names.default_url).rstrip("/"), key=key or None, bearer=bool(token))


def build_config(suite: Suite, agent: Agent, named: tuple[str, str], options: dict[str, Any]) -> RunConfig:
    """Build the run's configuration from the user's options, then the suite's defaults, then holdwater's."""
    suggested = suite.defaults
    said = {name: value for name, value in options.items() if value is not None}
    said.setdefault("attempts", suggested.attempts or 1)
    said.setdefault("workers", os.cpu_count() or 1)
    said.setdefault("sandbox", suggested.sandbox or "process")
    limits = said.pop("limits", Limits())
    if suggested.timeout is not None and limits.acting == Limits().acting:
        limits = msgspec.structs.replace(limits, acting=suggested.timeout)
    if said.get("model") is None and suggested.model is not None and agent.uses_model:
        said["model"] = suggested.model
    prices = said.pop("price", {})
    if said.get("model") is not None:
        url = find_first_url(said.get("base_url")) or _find_other_url()
        said["price"] = price_of(said["model"], prices, url)
        said["mapped_prices"] = {
            name: price_of(name, prices, url) for name in said.get("model_map", {}).values()
        }
    judge: JudgeModel = said.get("judge", JudgeModel())
    if judge.name is not None:
        url = judge.url or find_first_url(said.get("base_url")) or _find_other_url()
        said["judge"] = msgspec.structs.replace(judge, price=price_of(judge.name, prices, url))
    config = RunConfig(
        id=secrets.token_hex(8),
        suite=named[0],
        agent=named[1],
        created=time.time(),
        version=__version__,
        limits=limits,
        **said,
    )
    check_config(config)
    if suite.check_agent is not None:
        suite.check_agent(agent)
    return config


def forms_groups(suite: Suite, config: RunConfig) -> bool:
    """Whether the samples of an instance are scored together. A single sample keeps its own grade."""
    return suite.group is not None and config.samples > 1 and config.serving is None


def check_groups(suite: Suite, config: RunConfig) -> None:
    """Raise BadInput if the samples of an instance form a group that cannot run."""
    if not forms_groups(suite, config):
        return
    scores = f"suite `{suite.name}` scores the samples of an instance together"
    if config.samples > config.slots:
        raise BadInput(
            f"{scores}, and {config.samples} of them do not fit {config.slots} slots",
            f"they run at once: `--concurrency {config.samples}`, or fewer `--samples`",
        )
    if config.attempts > 1:
        raise BadInput(
            f"{scores}, so that each has one round: `--attempts {config.attempts}`",
            "leave `--attempts` out; `--retries` still repeats attempts that failed by no fault of the agent",
        )


def make_replay_config(config: RunConfig, run: Path, only: Sequence[str]) -> RunConfig:
    """Return the configuration of a run that replays the recorded replies of `run`, which has `config`."""
    return msgspec.structs.replace(
        config,
        id=secrets.token_hex(8),
        created=time.time(),
        version=__version__,
        replays=str(run.absolute()),
        serving=None,
        base_url=None,
        only=tuple(only),
        select=None,
        limit=None,
        shard=None,
        budget=RunBudget(),
        keep=KeepRule.ALL,
        rpm=None,
        tpm=None,
    )


def make_fork_config(config: RunConfig, origin: ForkOrigin, changes: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a fork of a run, which has `config`; `changes` are fields of its own."""
    made = msgspec.structs.replace(
        config,
        id=secrets.token_hex(8),
        created=time.time(),
        version=__version__,
        fork=origin,
        replays=None,
        only=(),
        select=None,
        limit=None,
        shard=None,
        samples=1,
        attempts=1,
        keep=KeepRule.ALL,
    )
    fields = {**changes, "sampling": {**config.sampling, **changes.get("sampling", {})}}
    prices = fields.pop("price", {})
    if "model" in fields and config.base_url == POLICY_URL:
        fields.setdefault("base_url", None)  # the function answered as another model
    made = msgspec.structs.replace(made, **fields)
    if made.model is not None and (prices or (made.model, made.base_url) != (config.model, config.base_url)):
        url = find_first_url(made.base_url) or _find_other_url()
        mapped = {name: price_of(name, prices, url) for name in made.model_map.values()}
        price = price_of(made.model, prices, url)
        made = msgspec.structs.replace(made, price=price, mapped_prices=mapped)
    check_config(made)
    return made


def check_config(config: RunConfig) -> None:
    """Refuse a configuration that can never work, by the option's name."""
    check_bounds(config)
    least_memory = (1 + config.workers) * PROCESS_MEMORY
    if config.memory is not None and config.memory < least_memory:
        needs = f"{least_memory // MiB} MiB for a conductor and {config.workers} workers"
        raise BadInput(f"`--memory` must be at least {needs}: {config.memory // MiB} MiB")
    if config.shard is not None and not 1 <= config.shard[0] <= config.shard[1]:
        raise BadInput(f"`--shard` must be i/n with 1 <= i <= n: {config.shard[0]}/{config.shard[1]}")
    if config.model_map and config.model is None:
        raise BadInput("`--model-map` needs `--model`", "the model of all other calls")
    if config.base_url is not None and config.base_url != POLICY_URL:
        check_endpoints(config.base_url, filter(None, (config.model, *config.model_map.values())))
    _check_judge(config)
    check_upstream_dialect(config.upstream_dialect)
    check_containers(config)
    timeouts = {"setup": "--setup-timeout", "acting": "--timeout", "grading": "--grade-timeout"}
    for name, flag in timeouts.items():
        if getattr(config.limits, name) <= 0:
            raise BadInput(f"`{flag}` must be more than 0: {getattr(config.limits, name):g}")
    limited = config.limits.cost is not None or config.budget.cost is not None
    for name, price in {config.model or "": config.price, **config.mapped_prices}.items():
        if limited and name and price is None:
            error = make_price_error(name)
            raise BadInput(error.message, error.hint)


def _check_judge(config: RunConfig) -> None:
    """Refuse credentials in the URL of the judges' server, and calls that a limit on cost would not count."""
    judge = config.judge
    if judge.url is not None and (problem := find_url_problem(judge.url)):
        raise BadInput(f"`--judge-base-url` {problem}", f"put the key into `{JUDGE_KEY}`")
    if judge.given and config.budget.cost is not None and judge.price is None:
        if judge.name is None:
            raise BadInput("`--run-cost` needs the price of the judges' model", "name it: `--judge-model`")
        error = make_price_error(judge.name)
        raise BadInput(error.message, error.hint)


def check_upstream_dialect(name: str) -> None:
    """Refuse a dialect to which calls cannot be translated."""
    targets = (other for other, dialect in DIALECTS.items() if dialect.translates)
    known = [AUTO_DIALECT, SAME_DIALECT, *targets]
    if name not in known:
        raise BadInput(f"`--upstream-dialect` must be one of `{'`, `'.join(known)}`: `{name[:100]}`")


def check_bounds(config: RunConfig | ServingConfig) -> None:
    """Refuse values below the bounds that their options state."""
    for entry in list_options(type(config)).values():
        value, least = entry.read(config), entry.option.least
        if value is not None and least is not None and value < least:
            raise BadInput(f"`{entry.flag}` must be at least {least}: {value:g}")
        if value is not None and entry.option.positive and value <= 0:
            raise BadInput(f"`{entry.flag}` must be more than 0: {value:g}")


def check_containers(config: RunConfig) -> None:
    """Refuse options for containers where sandboxes are no containers."""
    given = {
        "--image": config.image,
        "--images": config.images,
        "--sandbox-read-only": config.read_only,
    }
    kind = find_kind(config.sandbox)
    for flag, value in given.items():
        if value and not kind.takes_images:
            raise BadInput(f"`{flag}` requires containers", "add `--sandbox docker`")
    if config.remote != RemoteAddress() and not kind.elsewhere:
        raise BadInput("the `--sandbox-url` options require remote sandboxes", "add `--sandbox remote`")
    if config.sandbox_root is SandboxRoot.HOST and not kind.shows_machine:
        raise BadInput(
            "`--sandbox-root host` requires process sandboxes", "mount the needed paths with `--mount`"
        )


def check_requirements(suite: Suite, config: RunConfig, env: ProcessEnvironment) -> None:
    """Raise BadInput if the suite needs variables or slots that the run does not have."""
    check_groups(suite, config)
    _check_variables(suite, config, env)


def _check_variables(suite: Suite, config: RunConfig, env: ProcessEnvironment) -> None:
    """Refuse a suite with a chosen instance that requires a variable which is not passed on, or not set."""
    for need in suite.needs() if suite.needs is not None else ():
        name = need.variable
        if config.only and not any(fnmatch.fnmatchcase(need.instance, only) for only in config.only):
            continue
        if name in list_key_variables():
            raise BadInput(f"{need.place}: the variable `{name}` is not passed on", KEYS_WITHHELD)
        if name not in config.pass_env:
            raise BadInput(
                f"{need.place}: the variable `{name}` is not passed on", f"`--pass-env {name}` allows it"
            )
        if name not in env.inherited:
            raise BadInput(f"{need.place}: the variable `{name}` is not set", "set it")


def select_passed_variables(config: RunConfig, env: ProcessEnvironment) -> dict[str, str]:
    """Return the variables of the operator's environment that instances may use."""
    return {name: env.inherited[name] for name in config.pass_env if name in env.inherited}


def default_directory(suite: str) -> Path:
    """Return the relative path `runs/<time>-<suite>-<random>`: starts in the same second do not collide."""
    stem = Path(suite.split(":")[0]).stem if "/" in suite or "." in suite else suite.split(":")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(3)}"


def parse_bytes(text: str, flag: str) -> int:
    """Parse a size such as `512MiB`, `8GiB`, `1.5g` or `1000000`; return bytes."""
    if (found := parse_size(text)) is None:
        raise BadInput(f"invalid size for `{flag}`: `{text}`", "for example `512MiB` or `8GiB`")
    return found
