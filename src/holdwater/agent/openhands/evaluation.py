"""Runs an evaluation of the OpenHands benchmarks on one instance: its workspace is the attempt's sandbox.

`prepare_workspace` and `evaluate_instance` are the evaluation's own. A workspace that they make becomes the
sandbox, and a conversation on it runs in the worker: see `evaluation_workspace.py`. An exception of the
evaluation is never the agent's failure, so it never becomes a zero.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Agent, GradingSandbox, Model
from ...core.errors import AttemptError, ModelFailed, SandboxFailed, as_failure
from ...core.records import AttemptPhase, Instance
from ...evaluation import PREFIX, RESULT_NAME, LoadedEvaluation
from .sdk_agent import CONVERSATION_MEMORY, TERMINAL_MEMORY, check_packages, import_sdk

ROUNDS_A_SEED = 1000  # a model's seed is 1000 times the sample, and the round
LEAST_TEMPERATURE = 0.1  # of a later round, whose model must not repeat itself
OUTPUT_FOLDER = "evaluation"  # in the attempt's artifacts: files that the evaluation writes


def openhands_evaluation(spec: str) -> Agent:
    """Return the agent that runs the evaluation of the spec `openhands:module:Class?...`."""
    evaluations, name = WorkerEvaluations(spec), spec.partition("?")[0]
    return Agent(
        name=name,
        act=evaluations.act,
        needs_model=True,
        check=partial(check_packages, f"`{name}`", ""),
        prepare=evaluations.prepare,
        memory=TERMINAL_MEMORY,
        worker_memory=CONVERSATION_MEMORY,
        description=f"the evaluation `{spec.removeprefix(PREFIX)}`",
    )


class WorkerEvaluations:
    """Runs an evaluation on instances, each in a thread of this process."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._place: Path | None = None  # of the SDK's own files, and of those that its editor edits

    def prepare(self, place: Path) -> None:
        """Import the SDK; `place` gets its files."""
        self._place = place
        import_sdk(place)

    def act(self, instance: Instance, sandbox: GradingSandbox, model: Model) -> dict[str, Any]:
        """Evaluate the instance; return its result and its critic's verdict: the record has the history."""
        if self._place is None:  # a child of another agent
            self.prepare(Path(tempfile.mkdtemp()))
        place = Path(tempfile.mkdtemp(dir=self._place))
        try:
            return _evaluate(self._spec, instance, sandbox, model, place / "mirror")
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _evaluate(
    spec: str, instance: Instance, sandbox: GradingSandbox, model: Model, mirror: Path
) -> dict[str, Any]:
    from .evaluation_workspace import lend_workspace

    loaded = LoadedEvaluation(spec)
    own = _open_evaluation(loaded, sandbox, model)
    subject = loaded.make_instance(instance.id, instance.data)
    with lend_workspace(sandbox, mirror) as lent:
        try:
            workspace = own.prepare_workspace(subject) if loaded.spec.prepare else lent.workspace
            output = own.evaluate_instance(subject, workspace)
        except Exception as error:  # boundary: the evaluation's code
            if lent.failure is None and not isinstance(error, AttemptError | MemoryError):
                _save_result(own, subject, lent.workspace, error, sandbox)
                raise _make_failure(error) from error
            raise
        finally:
            if lent.failure is not None:  # the evaluation may have gone on without its sandbox
                raise lent.failure
    if output.error:
        raise SandboxFailed(f"the evaluation returned an error: {output.error}", kind="evaluation")
    return _render_output(own, output)


def _open_evaluation(loaded: LoadedEvaluation, sandbox: GradingSandbox, model: Model) -> Any:
    llm = {"model": f"openai/{model.name}", "base_url": model.url, "api_key": model.key}
    own = loaded.open(Path(sandbox.artifacts) / OUTPUT_FOLDER, llm)
    own.current_attempt = getattr(model, "seed", 1) % ROUNDS_A_SEED or 1
    if own.current_attempt > 1 and own.metadata.llm.temperature == 0.0:
        own.metadata.llm.temperature = LEAST_TEMPERATURE
    return own


def _render_output(own: Any, output: Any) -> dict[str, Any]:
    from openhands.sdk.event import LLMConvertibleEvent

    events = [event for event in output.history if isinstance(event, LLMConvertibleEvent)]
    critic = own.metadata.critic
    verdict = critic.evaluate(events, output.test_result.get("git_patch"))
    fields = output.model_dump(mode="json", include={"test_result", "instruction"})
    return {
        **fields,
        "attempt": own.current_attempt,
        "critic": critic.model_dump(mode="json"),
        "verdict": {"success": verdict.success, "score": verdict.score, "message": verdict.message},
    }


def _save_result(own: Any, subject: Any, workspace: Any, error: Exception, sandbox: GradingSandbox) -> None:
    """Save what the evaluation collects of a failed instance, such as its patch."""
    collect = getattr(own, "collect_failure_test_result", None)
    if collect is None:
        return
    try:
        content = msgspec.json.encode({"test_result": collect(subject, workspace, error)})
    except Exception as raised:  # boundary: the first error counts  # noqa: BLE001
        reason = as_failure(raised, SandboxFailed, AttemptPhase.ACTING).message
        content = msgspec.json.encode({"test_result": {}, "lost": reason})
    (Path(sandbox.artifacts) / RESULT_NAME).write_bytes(content)


def _make_failure(error: Exception) -> AttemptError:
    """Return the failure for an exception of the evaluation: its model's if its conversation has failed."""
    from openhands.sdk.conversation.exceptions import ConversationRunError

    place = traceback.extract_tb(error.__traceback__)[-1]
    message = as_failure(error, SandboxFailed, AttemptPhase.ACTING).message
    message = f"{message} ({Path(place.filename).name}:{place.lineno})"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConversationRunError):
            return ModelFailed(f"the evaluation's conversation failed: {message}", kind="conversation")
        cause = cause.__cause__ or cause.__context__
    return SandboxFailed(f"the evaluation raised: {message}", kind="evaluation")
