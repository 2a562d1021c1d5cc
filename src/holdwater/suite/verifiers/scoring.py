"""Runs the hooks of tasks in the process that scores: set-up, finalize, metrics, rewards, judges.

A trace is filled from the record on disk when the agent's time is over. `package.py` loads the taskset,
`runtime.py` is the sandbox as the hooks see it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...conversation.trace_graph import TraceGraph, build_trace_graphs
from ...conversation.trajectory import ExchangeTree
from ...core.authoring import AgentRecord, GradedAttempt, GradingSandbox, GroupMember
from ...core.errors import AttemptError, GradeFailed, SandboxFailed
from ...core.masking import mask_bytes
from ...core.records import AttemptFailure, Grade, Instance
from ...core.serving_protocol import TrajectoryReference
from ...ledger.attempt_files import taken_out_path
from ...ledger.directory import RunDirectory
from ...ledger.durable_files import make_directory, write_private
from .tasks import TasksetSpec, read_task

if TYPE_CHECKING:
    from .package import LoadedTaskset

TRACE_FILE = "trace.json"
EPISODE_FILE = "episode.json"  # the trace as the `run` of an environment has left it
MOST_OPEN = 4096  # attempts between their set-up and their grade, in one process
THREADS = 2  # for the import of the package, and for reading records
# The failures with which an agent's time ends, in the words of verifiers.
STOPS = {"requests": "max_turns", "input_tokens": "max_input_tokens", "output_tokens": "max_output_tokens"}

STATE = "state"  # the key in an answer: the state that tool servers left

# By the directory of an attempt's artifacts, in this process; bound: MOST_OPEN.
_open_tasks: OrderedDict[Path, OpenTask] = OrderedDict()
_judged: ContextVar[GradedAttempt | GroupMember | None] = ContextVar("judged", default=None)


class OpenTask(NamedTuple):
    """A task whose set-up has run: its hooks and its harness share the task and its trace."""

    taskset: LoadedTaskset
    task: Any
    trace: Any


def find_open_task(sandbox: GradingSandbox) -> OpenTask:
    """Return the task of an attempt; raise GradeFailed if its set-up has not run in this process."""
    opened = _open_tasks.get(sandbox.artifacts)
    if opened is None:
        raise GradeFailed("the task's set-up has not run in this process", kind="lost")
    return opened


class TasksetScorer:
    """The hooks of one taskset, as functions of a suite."""

    def __init__(self, spec: TasksetSpec) -> None:
        self._spec = spec
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-verifiers")
        self._loading: asyncio.Future[LoadedTaskset] | None = None

    async def set_up(self, instance: Instance, sandbox: GradingSandbox) -> None:
        """Run the task's `setup`."""
        taskset = await self._load()
        opened = self._open_task(taskset, instance, sandbox)
        runtime = _make_runtime(instance, sandbox, opened)
        await _call_hook(opened.task.setup, SandboxFailed, trace=opened.trace, runtime=runtime)

    async def grade(
        self, instance: Instance, sandbox: GradingSandbox, answer: Any, *, attempt: GradedAttempt
    ) -> Grade:
        """Run `finalize`, metrics, rewards and judges; return the sum of the rewards."""
        opened = find_open_task(sandbox)
        taskset, task, trace = opened
        runtime = _make_runtime(instance, sandbox, opened)
        await self._fill_trace(trace, attempt, answer)
        if taskset.drives_turns:  # also of an earlier attempt, whose work is graded again
            run, acted = RunDirectory(Path(attempt.reference.directory)), attempt.reference.attempt
            _restore_scores(trace, taken_out_path(run, acted) / EPISODE_FILE)
        with _judged_by(attempt):
            await _call_hook(task.finalize, GradeFailed, trace=trace, runtime=runtime)
            await _await_hook(task.score(trace, runtime), GradeFailed)
            trace.ok = True
            if self._spec.env and not attempt.grouped:
                await self._compare_traces(taskset, task, [trace])
        write_trace(trace, sandbox)
        del _open_tasks[sandbox.artifacts]
        return self._make_grade(trace)

    async def score_group(self, instance: Instance, members: Sequence[GroupMember]) -> list[Grade]:
        """Let the environment's `finalize` compare the samples of a task."""
        taskset = await self._load()
        task = taskset.build_task(read_task(instance).data)
        traces = []
        for member in members:
            trace = make_trace(taskset.vf, task)
            await self._fill_trace(trace, member, member.answer)
            _restore_scores(trace, member.sandbox.artifacts / TRACE_FILE)
            traces.append(trace)
        with _judged_by(members[0]):
            await self._compare_traces(taskset, task, traces)
        for member, trace in zip(members, traces, strict=True):
            write_trace(trace, member.sandbox)
        return [self._make_grade(trace) for trace in traces]

    async def _fill_trace(self, trace: Any, attempt: AgentRecord, answer: Any) -> None:
        loop, reference = asyncio.get_running_loop(), attempt.reference
        graph = await loop.run_in_executor(self._threads, _read_graph, reference)
        _fill_trace(trace, graph, answer, attempt.failure)

    async def _compare_traces(self, taskset: LoadedTaskset, task: Any, traces: list[Any]) -> None:
        vf = taskset.vf
        episode = vf.Episode(env=vf.EnvInfo(id=self._spec.env), task=traces[0].task, traces=traces, ok=True)
        await _await_hook(taskset.make_env().finalize(task, episode), GradeFailed)

    async def _load(self) -> LoadedTaskset:
        """Import the package once, in a thread: it takes seconds."""
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.get_running_loop().run_in_executor(self._threads, _load, self._spec)
        return await asyncio.shield(self._loading)

    def _open_task(self, taskset: LoadedTaskset, instance: Instance, sandbox: GradingSandbox) -> OpenTask:
        task = taskset.build_task(read_task(instance).data)
        opened = OpenTask(taskset, task, make_trace(taskset.vf, task))
        _open_tasks[sandbox.artifacts] = opened
        while len(_open_tasks) > MOST_OPEN:
            _open_tasks.popitem(last=False)
        return opened

    def _make_grade(self, trace: Any) -> Grade:
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward.{name}": reward.score for name, reward in rewards.items()}
        metrics |= {f"weight.{name}": reward.weight for name, reward in rewards.items()}
        score = float(trace.reward)
        return Grade(
            passed=score >= self._spec.passing,
            score=score,
            detail="\n".join(f"{name}: {r.score:g} x {r.weight:g}" for name, r in rewards.items()),
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        )


def _load(spec: TasksetSpec) -> LoadedTaskset:
    from .package import LoadedTaskset

    taskset = LoadedTaskset(spec)
    _route_judges()
    return taskset


def make_trace(vf: Any, task: Any) -> Any:
    """Return an empty trace of a task."""
    from verifiers.v1.state import state_cls

    described = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
    return vf.Trace(task=described, state=state_cls(type(task))(), agent=agent)


def _make_runtime(instance: Instance, sandbox: GradingSandbox, opened: OpenTask) -> Any:
    from .runtime import SandboxRuntime

    return SandboxRuntime(sandbox, opened.trace.id, opened.task.runtime_env(), instance.start.user)


async def refresh_trace(trace: Any, reference: TrajectoryReference) -> None:
    """Fill a trace with the conversation so far, while the agent still acts."""
    graph = await asyncio.get_running_loop().run_in_executor(None, _read_graph, reference)
    _fill_messages(trace, graph, graph.nodes)


def _read_graph(reference: TrajectoryReference) -> TraceGraph:
    """Read the agent's own conversation: neither its children's, nor a judge's. Blocks."""
    tree = ExchangeTree(RunDirectory(Path(reference.directory)), reference.attempt)
    return build_trace_graphs(tree)[0]


def _fill_trace(trace: Any, graph: TraceGraph, answer: Any, failure: AttemptFailure | None) -> None:
    """Fill a trace from the record; the answer stands for the reply of an agent that called no model."""
    nodes = graph.nodes
    if not nodes and isinstance(answer, str):
        prompt = {"parent": None, "message": {"role": "user", "content": trace.task.data.prompt_text}}
        reply = {"parent": 0, "message": {"role": "assistant", "content": answer}, "sampled": True}
        nodes = [prompt, reply]
    if isinstance(answer, dict) and STATE in answer:
        trace.state = type(trace.state).model_validate(answer[STATE])
    _fill_messages(trace, graph, nodes)
    trace.stop("agent_completed" if failure is None else STOPS.get(failure.kind, failure.kind))
    trace.is_timeout = failure is not None and failure.kind == "timeout"


def _fill_messages(trace: Any, graph: TraceGraph, nodes: Sequence[dict[str, Any]]) -> None:
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import ModelCall
    from verifiers.v1.types import Tool

    trace.nodes = [MessageNode.model_validate(node) for node in nodes]
    trace.calls = [ModelCall.model_validate(call) for call in graph.calls]
    trace.tools = [Tool.model_validate(tool) for tool in graph.tools]


async def _call_hook(hook: Any, otherwise: type[AttemptError], **available: Any) -> None:
    """Call a hook with the arguments that it names."""
    from verifiers.v1.utils.decorators import invoke

    await _await_hook(invoke(hook, available), otherwise)


async def _await_hook(work: Awaitable[Any], otherwise: type[AttemptError]) -> None:
    """Await a hook. An error of the sandbox or the model stays what it is; others are the task's."""
    try:
        await work
    except AttemptError:
        raise
    except Exception as error:  # boundary: the task's code
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, AttemptError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise otherwise(f"{type(error).__name__}: {error}", kind="task") from error


def write_trace(trace: Any, sandbox: GradingSandbox, name: str = TRACE_FILE) -> None:
    """Keep verifiers' own record of the trace with the attempt; the exchanges are in the run's record."""
    record = {
        name: value for name, value in trace.to_record().items() if name not in ("nodes", "calls", "tools")
    }
    make_directory(sandbox.artifacts)
    write_private(sandbox.artifacts / name, mask_bytes(msgspec.json.encode(record)))


def _restore_scores(trace: Any, path: Path) -> None:
    """Restore the scores of a trace that was written: by a member's own grading, or by an environment."""
    record = msgspec.json.decode(path.read_bytes())
    trace.id, trace.info, trace.ok = record["id"], record["info"], True
    trace.record_metrics({name: value for name, value in record["metrics"].items() if value is not None})
    for name, reward in record["rewards"].items():
        if reward is not None:
            trace.record_reward(name, reward["score"], reward["weight"])


@contextmanager
def _judged_by(attempt: GradedAttempt | GroupMember) -> Iterator[None]:
    """Send the calls of judges to the model of this attempt until the block ends."""
    token = _judged.set(attempt)
    try:
        yield
    finally:
        _judged.reset(token)


def _route_judges() -> None:
    """Make judges call the gateway instead of their own endpoint, which records and counts their calls.

    A judge makes its client for each call, with the function that is replaced here. Tasks build judges
    wherever they like, so that no configuration reaches all of them.
    """
    from openai import AsyncOpenAI
    from verifiers.v1 import judge
    from verifiers.v1.clients.base import build_async_httpx

    own = judge.build_async_openai

    def build_client(config: Any) -> Any:
        attempt = _judged.get()
        if attempt is None:
            return own(config)
        return AsyncOpenAI(
            base_url=attempt.model.url,
            api_key=attempt.model.key,
            max_retries=0,
            http_client=build_async_httpx(config),
        )

    if getattr(own, "__module__", "") != __name__:
        judge.build_async_openai = build_client
