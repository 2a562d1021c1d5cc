"""`holdwater run`: starts a run of a suite with an agent, a model and budgets, from flags and a TOML file."""

# No `from __future__ import annotations`: `serve.py` builds its flags from these annotations.
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from .config_file import merge_flags
from .console import CommandConsole
from .flags import Flag

if TYPE_CHECKING:
    from ..api import PreparedRun

CHOOSING = Group("Suite, agent and model", sort_key=1)
TRYING = Group("Attempts and retries", sort_key=2)
LIMITS = Group("Limits (seconds; sizes such as `512MiB`)", sort_key=3)
BUDGETS = Group("Budgets of model calls (US dollars)", sort_key=4)
MACHINE = Group("Sandboxes, workers and files", sort_key=5)


def _option(group: Group, text: str) -> Any:
    return Parameter(group=group, help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class SharedFlags:
    """Flags that a run and a server share. A TOML file may set each of them."""

    agent: Annotated[
        str | None,
        _option(CHOOSING, "`bash`, `claude-code`, ... (see `holdwater agents`), `command` or `path.py:name`"),
    ] = None
    command: Annotated[
        str | None,
        _option(CHOOSING, "With `--agent command`: the program, with placeholders such as `{instruction}`"),
    ] = None
    model: Annotated[
        str | None,
        _option(CHOOSING, "The model's name; `OPENAI_API_KEY` and `OPENAI_BASE_URL` set its key and server"),
    ] = None
    base_url: Annotated[
        str | None, _option(CHOOSING, "The URL of the model's server; overrides `OPENAI_BASE_URL`")
    ] = None
    retries: Annotated[int | None, _option(TRYING, "Retries after an infrastructure failure (2)")] = None
    timeout: Annotated[float | None, _option(LIMITS, "For acting, from when the agent starts (3600)")] = None
    working_time: Annotated[
        float | None, _option(LIMITS, "For acting, without the time spent waiting for a rate limit")
    ] = None
    setup_timeout: Annotated[float | None, _option(LIMITS, "For set-up (300)")] = None
    grade_timeout: Annotated[float | None, _option(LIMITS, "For grading (600)")] = None
    sandbox_memory: Annotated[
        str | None, _option(LIMITS, "For each sandbox; a retry after hitting it gets twice as much")
    ] = None
    sandbox_disk: Annotated[
        str | None,
        _option(LIMITS, "For the files of each sandbox; a retry after hitting it gets twice as much"),
    ] = None
    sandbox_cpus: Annotated[float | None, _option(LIMITS, "Cores that each sandbox may use at once")] = None
    sandbox_cpu_seconds: Annotated[
        float | None,
        _option(LIMITS, "CPU time of each sandbox's commands, in set-up, acting and grading each"),
    ] = None
    sandbox_pids: Annotated[int | None, _option(LIMITS, "Processes of each sandbox at once (512)")] = None
    sandbox_output: Annotated[
        str | None,
        _option(LIMITS, "Output of each sandbox's commands in set-up, acting and grading each (256MiB)"),
    ] = None
    memory: Annotated[
        str | None,
        _option(LIMITS, "The run's budget: attempts wait until they fit (default: the container's limit)"),
    ] = None
    disk: Annotated[
        str | None, _option(LIMITS, "The budget for the run directory and scratch (default: the whole disk)")
    ] = None
    disk_patience: Annotated[
        float | None, _option(LIMITS, "Seconds that a run waits for free disk space before it stops (600)")
    ] = None
    worker_memory: Annotated[str | None, _option(LIMITS, "A worker above this is replaced (1GiB)")] = None
    max_requests: Annotated[int | None, _option(BUDGETS, "Model calls of an attempt")] = None
    max_input_tokens: Annotated[int | None, _option(BUDGETS, "Input tokens of an attempt")] = None
    max_output_tokens: Annotated[int | None, _option(BUDGETS, "Output tokens of an attempt")] = None
    max_cost: Annotated[float | None, _option(BUDGETS, "Cost of an attempt")] = None
    run_requests: Annotated[
        int | None, _option(BUDGETS, "Model calls of the run; reaching it stops the run")
    ] = None
    run_tokens: Annotated[int | None, _option(BUDGETS, "Input and output tokens of the run")] = None
    run_cost: Annotated[float | None, _option(BUDGETS, "Cost of the run")] = None
    run_time: Annotated[float | None, _option(BUDGETS, "Seconds that the run may take, resumes included")] = (
        None
    )
    largest_request: Annotated[
        str | None,
        _option(BUDGETS, "Uncompressed size of a model request; larger ones are rejected (256MiB)"),
    ] = None
    rpm: Annotated[float | None, _option(BUDGETS, "Model calls per minute, over all workers")] = None
    tpm: Annotated[float | None, _option(BUDGETS, "Tokens per minute, over all workers")] = None
    prices: Annotated[
        str | None, _option(BUDGETS, "A TOML file with prices by model; see `holdwater help models`")
    ] = None
    sampling: Annotated[
        list[str] | None, _option(CHOOSING, "Set in every request: `temperature=0.7`; may be repeated")
    ] = None
    concurrency: Annotated[
        int | Literal["auto"] | None,
        _option(MACHINE, "Concurrent attempts, or `auto`: as many as the budget and the CPU allow (auto)"),
    ] = None
    ungoverned: Annotated[
        bool | None, _option(MACHINE, "Only measure memory; attempts do not wait for it")
    ] = None
    workers: Annotated[
        int | None,
        _option(MACHINE, "Worker processes that host the attempts; 0: only this process (one per core)"),
    ] = None
    sandbox: Annotated[
        str | None,
        _option(MACHINE, "Where agents act: `process` or `docker` (default: the suite's suggestion)"),
    ] = None
    image: Annotated[
        str | None,
        _option(MACHINE, "With `docker`: the image for instances without one, such as `debian:12`"),
    ] = None
    mount: Annotated[
        list[str] | None,
        _option(
            MACHINE, "`tools:/opt/tools`: shown in sandboxes, read-only, its `bin` on PATH; may be repeated"
        ),
    ] = None
    sandbox_root: Annotated[
        str | None,
        _option(
            MACHINE, "Files that a process sandbox shows: `system` (default) or `host`, all of this machine"
        ),
    ] = None
    sandbox_read_only: Annotated[
        bool | None, _option(MACHINE, "With `docker`: only the working directory is writable")
    ] = None
    network: Annotated[
        str | None, _option(MACHINE, "The network of a sandbox: `gateway` (default), `none` or `open`")
    ] = None
    pass_env: Annotated[
        list[str] | None,
        _option(MACHINE, "A variable that a suite may use as `${NAME}`; may be repeated (none)"),
    ] = None
    images: Annotated[
        str | None, _option(MACHINE, "With containers: an `images.toml` that gives instances their images")
    ] = None
    scratch: Annotated[
        str | None, _option(MACHINE, "Where sandboxes keep their files (default: the run directory)")
    ] = None
    keep: Annotated[
        str | None,
        _option(
            MACHINE, "Samples whose files stay when they are closed: `all` (default), `failures` or `none`"
        ),
    ] = None
    silence: Annotated[
        float | None,
        _option(MACHINE, "Seconds without a heartbeat after which a worker counts as hung (20)"),
    ] = None
    recycle_after: Annotated[
        int | None, _option(MACHINE, "Attempts after which a worker is replaced (5000)")
    ] = None
    suite_timeout: Annotated[
        float | None, _option(MACHINE, "Seconds without an instance after which a suite counts as hung (600)")
    ] = None
    backoff: Annotated[float | None, _option(MACHINE, "Seconds before the first retry; doubles (1)")] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class RunFlags(SharedFlags):
    """Flags of a run only: its instances, and the number of attempts and samples."""

    only: Annotated[
        list[str] | None, _option(CHOOSING, "Only instances whose id matches this pattern; may be repeated")
    ] = None
    limit: Annotated[int | None, _option(CHOOSING, "Only the first N instances")] = None
    shard: Annotated[str | None, _option(CHOOSING, "Only part i of n: `1/4`")] = None
    attempts: Annotated[
        int | None, _option(TRYING, "Attempts per instance until the critic accepts one (1)")
    ] = None
    critic: Annotated[
        str | None,
        _option(
            TRYING,
            "`grade`: it passed (default); `finished`; `finished-with-patch`; `patch`; `command:LINE`; "
            "`path.py:name`",
        ),
    ] = None
    samples: Annotated[
        int | None, _option(TRYING, "Independent samples of each instance, for pass@k (1)")
    ] = None
    grace: Annotated[
        float | None, _option(MACHINE, "Seconds that running attempts get after the first Ctrl-C (30)")
    ] = None


def run(
    suite: str,
    /,
    *,
    flags: RunFlags = RunFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    dry_run: Flag = False,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run a suite with an agent.

    For example: `holdwater run demo`, or
    `holdwater run tasks.jsonl --agent bash --model gpt-5 --concurrency 30 --timeout 1800 --out runs/mine`.

    Exit status: 0 all settled, 1 settled with infrastructure failures left, 2 bad input, 3 interrupted and
    resumable, 4 stopped by a budget or a failure that affects every instance.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        The run's directory (default: `runs/<time>-<suite>`).
    config
        A TOML file with flags; flags on the command line take precedence.
    dry_run
        Print the plan of the run, and do nothing.
    json
        Print the run's summary as one JSON document on stdout.
    quiet
        Show no live display and no closing page.
    """
    console = CommandConsole.claim()
    from .. import api

    said = merge_flags(flags, config)
    agent = _agent_spec(said.pop("agent"), said.pop("command"))
    prepared = api.prepare(suite, agent, out, said)  # type: ignore[arg-type]
    if dry_run:
        return _print_dry_run(prepared, console, json)
    from .foreground_run import run_in_foreground

    return run_in_foreground(lambda around: api.start(prepared, around), json=json, quiet=quiet)


def _agent_spec(agent: str | None, command: str | None) -> str | None:
    """Return the agent `command:LINE` for `--agent command --command LINE`, or for `--command LINE` alone."""
    from ..core.errors import BadInput

    if command is None:
        if agent == "command":
            raise BadInput(
                "`--agent command` needs `--command`", "for example `--command 'mytool {instruction}'`"
            )
        return agent
    if agent not in (None, "command"):
        raise BadInput(f"`--command` requires `--agent command`, not `{agent}`")
    return f"command:{command}"


def _print_dry_run(prepared: "PreparedRun", console: CommandConsole, json: bool) -> int:
    """Print the plan of the run."""
    import uvloop

    from ..api import check_start
    from ..run.conductor.instance_source import InstanceSource

    async def look() -> tuple[list[str], int | None]:
        await check_start(prepared)
        source = InstanceSource(prepared.suite, prepared.config)
        try:
            first: list[str] = []
            while len(first) < 10 and (items := await source.take(10 - len(first))):
                first += [instance.id for instance, _ in items]
            return first, source.total
        finally:
            source.close()
            if source.error is not None:
                raise source.error

    first, total = uvloop.run(look())
    if json:
        console.write_json(
            {"directory": prepared.path, "config": prepared.config, "instances": total, "first": first}
        )
        return 0
    config, limits = prepared.config, prepared.config.limits
    lines = [
        f"would run suite `{config.suite}` with agent `{config.agent}` on model `{config.model or 'none'}`",
        f"instances: {'unknown before the run' if total is None else total}, "
        f"samples {config.samples}, attempts {config.attempts}, retries {config.retries}",
        f"first: {', '.join(first)}{', ...' if len(first) == 10 else ''}",
        f"at once: at most {config.slots} attempts in {config.workers} workers, as the budget allows",
        f"limits: set-up {limits.setup:g} s, acting {limits.acting:g} s, grading {limits.grading:g} s",
        f"directory: {prepared.path}",
    ]
    console.write_page("\n".join(lines))
    return 0
