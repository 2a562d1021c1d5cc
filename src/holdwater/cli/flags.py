"""Flags that several verbs share, and the TOML file that can set them; the command line takes precedence."""

# No `from __future__ import annotations`: `serve.py` builds its flags from these annotations.
import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from cyclopts import Group, Parameter

from ..core.errors import BadInput

CHOOSING = Group("Suite, agent and model", sort_key=1)
TRYING = Group("Attempts and retries", sort_key=2)
LIMITS = Group("Limits (seconds; sizes such as `512MiB`)", sort_key=3)
BUDGETS = Group("Budgets of model calls (US dollars)", sort_key=4)
MACHINE = Group("Sandboxes, workers and files", sort_key=5)
RETRY_GROUP = Group("Samples to retry", sort_key=1)
SETTINGS_GROUP = Group("Settings that replace the run's own from now on", sort_key=2)
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]


def make_option(group: Group, text: str) -> Any:
    return Parameter(group=group, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class SharedFlags:
    """Flags that a run and a server share. A TOML file may set each of them."""

    agent: Annotated[
        str | None,
        make_option(CHOOSING, "`bash`, `claude-code`, ... (see `holdwater agents`), `command` or `path.py:name`"),
    ] = None
    command: Annotated[
        str | None,
        make_option(CHOOSING, "With `--agent command`: the program, with placeholders such as `{instruction}`"),
    ] = None
    model: Annotated[
        str | None,
        make_option(CHOOSING, "The model's name; `OPENAI_API_KEY` and `OPENAI_BASE_URL` set its key and server"),
    ] = None
    base_url: Annotated[
        str | None, make_option(CHOOSING, "The URL of the model's server; overrides `OPENAI_BASE_URL`")
    ] = None
    retries: Annotated[int | None, make_option(TRYING, "Retries after an infrastructure failure (2)")] = None
    timeout: Annotated[float | None, make_option(LIMITS, "For acting, from when the agent starts (3600)")] = None
    working_time: Annotated[
        float | None, make_option(LIMITS, "For acting, without the time spent waiting for a rate limit")
    ] = None
    setup_timeout: Annotated[float | None, make_option(LIMITS, "For set-up (300)")] = None
    grade_timeout: Annotated[float | None, make_option(LIMITS, "For grading (600)")] = None
    sandbox_memory: Annotated[
        str | None, make_option(LIMITS, "For each sandbox; a retry after hitting it gets twice as much")
    ] = None
    sandbox_disk: Annotated[
        str | None,
        make_option(LIMITS, "For the files of each sandbox; a retry after hitting it gets twice as much"),
    ] = None
    sandbox_cpus: Annotated[float | None, make_option(LIMITS, "Cores that each sandbox may use at once")] = None
    sandbox_cpu_seconds: Annotated[
        float | None,
        make_option(LIMITS, "CPU time of each sandbox's commands, in set-up, acting and grading each"),
    ] = None
    sandbox_pids: Annotated[int | None, make_option(LIMITS, "Processes of each sandbox at once (512)")] = None
    sandbox_output: Annotated[
        str | None,
        make_option(LIMITS, "Output of each sandbox's commands in set-up, acting and grading each (256MiB)"),
    ] = None
    memory: Annotated[
        str | None,
        make_option(LIMITS, "The run's budget: attempts wait until they fit (default: the container's limit)"),
    ] = None
    disk: Annotated[
        str | None, make_option(LIMITS, "The budget for the run directory and scratch (default: the whole disk)")
    ] = None
    disk_patience: Annotated[
        float | None, make_option(LIMITS, "Seconds that a run waits for free disk space before it stops (600)")
    ] = None
    worker_memory: Annotated[str | None, make_option(LIMITS, "A worker above this is replaced (1GiB)")] = None
    max_requests: Annotated[int | None, make_option(BUDGETS, "Model calls of an attempt")] = None
    max_input_tokens: Annotated[int | None, make_option(BUDGETS, "Input tokens of an attempt")] = None
    max_output_tokens: Annotated[int | None, make_option(BUDGETS, "Output tokens of an attempt")] = None
    max_cost: Annotated[float | None, make_option(BUDGETS, "Cost of an attempt")] = None
    run_requests: Annotated[
        int | None, make_option(BUDGETS, "Model calls of the run; reaching it stops the run")
    ] = None
    run_tokens: Annotated[int | None, make_option(BUDGETS, "Input and output tokens of the run")] = None
    run_cost: Annotated[float | None, make_option(BUDGETS, "Cost of the run")] = None
    run_time: Annotated[float | None, make_option(BUDGETS, "Seconds that the run may take, resumes included")] = (
        None
    )
    largest_request: Annotated[
        str | None,
        make_option(BUDGETS, "Uncompressed size of a model request; larger ones are rejected (256MiB)"),
    ] = None
    rpm: Annotated[float | None, make_option(BUDGETS, "Model calls per minute, over all workers")] = None
    tpm: Annotated[float | None, make_option(BUDGETS, "Tokens per minute, over all workers")] = None
    prices: Annotated[
        str | None, make_option(BUDGETS, "A TOML file with prices by model; see `holdwater help models`")
    ] = None
    sampling: Annotated[
        list[str] | None, make_option(CHOOSING, "Set in every request: `temperature=0.7`; may be repeated")
    ] = None
    concurrency: Annotated[
        int | Literal["auto"] | None,
        make_option(MACHINE, "Concurrent attempts, or `auto`: as many as the budget and the CPU allow (auto)"),
    ] = None
    ungoverned: Annotated[
        bool | None, make_option(MACHINE, "Only measure memory; attempts do not wait for it")
    ] = None
    workers: Annotated[
        int | None,
        make_option(MACHINE, "Worker processes that host the attempts; 0: only this process (one per core)"),
    ] = None
    sandbox: Annotated[
        str | None,
        make_option(MACHINE, "Where agents act: `process` or `docker` (default: the suite's suggestion)"),
    ] = None
    image: Annotated[
        str | None,
        make_option(MACHINE, "With `docker`: the image for instances without one, such as `debian:12`"),
    ] = None
    mount: Annotated[
        list[str] | None,
        make_option(
            MACHINE, "`tools:/opt/tools`: shown in sandboxes, read-only, its `bin` on PATH; may be repeated"
        ),
    ] = None
    sandbox_root: Annotated[
        str | None,
        make_option(
            MACHINE, "Files that a process sandbox shows: `system` (default) or `host`, all of this machine"
        ),
    ] = None
    sandbox_read_only: Annotated[
        bool | None, make_option(MACHINE, "With `docker`: only the working directory is writable")
    ] = None
    network: Annotated[
        str | None, make_option(MACHINE, "The network of a sandbox: `gateway` (default), `none` or `open`")
    ] = None
    pass_env: Annotated[
        list[str] | None,
        make_option(MACHINE, "A variable that a suite may use as `${NAME}`; may be repeated (none)"),
    ] = None
    images: Annotated[
        str | None, make_option(MACHINE, "With containers: an `images.toml` that gives instances their images")
    ] = None
    scratch: Annotated[
        str | None, make_option(MACHINE, "Where sandboxes keep their files (default: the run directory)")
    ] = None
    keep: Annotated[
        str | None,
        make_option(
            MACHINE, "Samples whose files stay when they are closed: `all` (default), `failures` or `none`"
        ),
    ] = None
    silence: Annotated[
        float | None,
        make_option(MACHINE, "Seconds without a heartbeat after which a worker counts as hung (20)"),
    ] = None
    recycle_after: Annotated[
        int | None, make_option(MACHINE, "Attempts after which a worker is replaced (5000)")
    ] = None
    suite_timeout: Annotated[
        float | None, make_option(MACHINE, "Seconds without an instance after which a suite counts as hung (600)")
    ] = None
    backoff: Annotated[float | None, make_option(MACHINE, "Seconds before the first retry; doubles (1)")] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class RunFlags(SharedFlags):
    """Flags of a run only: its instances, and the number of attempts and samples."""

    only: Annotated[
        list[str] | None, make_option(CHOOSING, "Only instances whose id matches this pattern; may be repeated")
    ] = None
    limit: Annotated[int | None, make_option(CHOOSING, "Only the first N instances")] = None
    shard: Annotated[str | None, make_option(CHOOSING, "Only part i of n: `1/4`")] = None
    attempts: Annotated[
        int | None, make_option(TRYING, "Attempts per instance until the critic accepts one (1)")
    ] = None
    critic: Annotated[
        str | None,
        make_option(
            TRYING,
            "`grade`: it passed (default); `finished`; `finished-with-patch`; `patch`; `command:LINE`; "
            "`path.py:name`",
        ),
    ] = None
    samples: Annotated[
        int | None, make_option(TRYING, "Independent samples of each instance, for pass@k (1)")
    ] = None
    grace: Annotated[
        float | None, make_option(MACHINE, "Seconds that running attempts get after the first Ctrl-C (30)")
    ] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """Settings that a resume changes. Each is also an option of `api.resume`."""

    retry: Annotated[
        list[str] | None,
        make_option(
            RETRY_GROUP, "`failed`, `infrastructure`, `all`, or a pattern over instance ids; may be repeated"
        ),
    ] = None
    retry_poison: Annotated[
        bool | None, make_option(RETRY_GROUP, "Also retry instances that crashed their workers")
    ] = None
    concurrency: Annotated[
        int | Literal["auto"] | None, make_option(SETTINGS_GROUP, "Concurrent attempts, or `auto`")
    ] = None
    workers: Annotated[int | None, make_option(SETTINGS_GROUP, "Worker processes that host the attempts")] = None
    attempts: Annotated[int | None, make_option(SETTINGS_GROUP, "Attempts per instance")] = None
    retries: Annotated[int | None, make_option(SETTINGS_GROUP, "Retries after an infrastructure failure")] = None
    timeout: Annotated[float | None, make_option(SETTINGS_GROUP, "Time limit for acting, in seconds")] = None
    memory: Annotated[str | None, make_option(SETTINGS_GROUP, "The memory budget, such as `8GiB`")] = None
    disk: Annotated[str | None, make_option(SETTINGS_GROUP, "The disk budget, such as `80GiB`")] = None
    base_url: Annotated[str | None, make_option(SETTINGS_GROUP, "The URL of the model's server")] = None
    pass_env: Annotated[
        list[str] | None,
        make_option(SETTINGS_GROUP, "A variable that a suite may use as `${NAME}`; may be repeated"),
    ] = None
    rpm: Annotated[float | None, make_option(SETTINGS_GROUP, "Model calls per minute")] = None
    tpm: Annotated[float | None, make_option(SETTINGS_GROUP, "Tokens per minute")] = None
    run_requests: Annotated[int | None, make_option(SETTINGS_GROUP, "The budget of model calls")] = None
    run_tokens: Annotated[int | None, make_option(SETTINGS_GROUP, "The budget of tokens")] = None
    run_cost: Annotated[float | None, make_option(SETTINGS_GROUP, "The budget of cost, in US dollars")] = None
    run_time: Annotated[float | None, make_option(SETTINGS_GROUP, "The budget of time, in seconds")] = None


def merge_flags(flags: Any, config: Path | None) -> dict[str, Any]:
    """Return the flags of the command line (a dataclass), with missing ones filled in from the file."""
    said = dataclasses.asdict(flags)
    if config is None:
        return said
    kinds = get_type_hints(type(flags))
    for name, value in _read(config).items():
        key = name.replace("-", "_")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean `{near[0].replace('_', '-')}`?" if near else ""
            raise BadInput(f"{config}: unknown setting: `{name}`", hint)
        if said[key] is None:
            try:
                said[key] = msgspec.convert(value, kinds[key])
            except msgspec.ValidationError as error:
                raise BadInput(f"{config}: `{name}`: {_explain_error(error)}") from None
    return said


def _explain_error(error: msgspec.ValidationError) -> str:
    """Return `expected int, got str`, without the `null` that TOML does not have."""
    text = str(error).replace(" | null", "").replace("Invalid enum value", "invalid value:")
    return text[0].lower() + text[1:]


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read `{config}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{config}: not TOML: {error}") from None
