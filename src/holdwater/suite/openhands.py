"""The suite of an evaluation of the OpenHands benchmarks: its instances, patches and critic.

The evaluation itself acts, in the attempt: `agent/openhands/evaluation.py`. Its output is the answer that is
graded here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from ..core.authoring import CriticInput, GradedAttempt, GradingSandbox, Suite, SuiteDefaults
from ..core.errors import BadInput, GradeFailed
from ..core.failures import RULES, ScoreRule
from ..core.records import Grade, Instance, SandboxSpec
from ..evaluation import RESULT_NAME, EvaluationSpec, LoadedEvaluation, parse_evaluation

NO_MODEL = {"model": "openai/none", "base_url": "http://127.0.0.1:9", "api_key": "none"}
NO_OUTPUT = "the evaluation returned no output"


def openhands(spec: str) -> Suite:
    """Return the suite for the spec `openhands:module:Class?...`; the class is loaded when it is needed."""
    options = parse_evaluation(spec)

    def check() -> None:
        with tempfile.TemporaryDirectory() as directory:
            LoadedEvaluation(spec).open(Path(directory), NO_MODEL)

    return Suite(
        name=options.place.rpartition(":")[2] or options.place,
        instances=lambda: _read_instances(spec),
        grade=judge_output,
        patch=take_patch,
        check=check,
        fresh=False,  # the evaluation has made its judgement; grading runs nothing in the sandbox
        defaults=SuiteDefaults(agent=spec, sandbox="docker" if options.image else "process"),
        description=f"the evaluation `{options.place}` of OpenHands' benchmarks",
    )


def ask_critic(instance: Instance, tried: CriticInput) -> bool:
    """Return whether the evaluation's own critic is satisfied, for `--critic`."""
    answer = tried.answer if isinstance(tried.answer, dict) else {}
    return tried.failure is None and bool(answer.get("verdict", {}).get("success"))


def take_patch(instance: Instance, sandbox: GradingSandbox, answer: Any) -> str:
    """Return the patch of the output, or the one that a failed evaluation has saved."""
    if not isinstance(answer, dict):
        try:
            answer = msgspec.json.decode((sandbox.artifacts / RESULT_NAME).read_bytes())
        except FileNotFoundError:
            return ""
    patch = answer.get("test_result", {}).get("git_patch")
    return patch if isinstance(patch, str) else ""


def judge_output(instance: Instance, sandbox: GradingSandbox, patch: str, attempt: GradedAttempt) -> Grade:
    """Grade an output: it passes if its critic is satisfied and its own score, if any, is at least 1."""
    answer = attempt.answer
    if not isinstance(answer, dict):
        if attempt.failure is not None and RULES[attempt.failure.where].scored is not ScoreRule.YES:
            raise GradeFailed(NO_OUTPUT)  # the failure before it is the one that counts
        return Grade(passed=False, score=0.0, detail=NO_OUTPUT)
    result, verdict = answer["test_result"], answer["verdict"]
    metrics = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    score = metrics.get("score", verdict["score"])
    passed = verdict["success"] and ("score" not in metrics or score >= 1)
    return Grade(passed=passed, score=score, detail=verdict["message"] or "", metrics=metrics)


def _read_instances(spec: str) -> Iterator[Instance]:
    with tempfile.TemporaryDirectory() as directory:
        loaded = LoadedEvaluation(spec)
        evaluation = loaded.open(Path(directory), NO_MODEL)
        for found in evaluation.prepare_instances():
            yield _make_instance(loaded.spec, found.id, found.data)


def _make_instance(options: EvaluationSpec, name: str, data: Mapping[str, Any]) -> Instance:
    image = options.image.replace("{id}", name) if options.image else None
    return Instance(
        id=name,
        data={key: _to_plain(value, f"instance `{name}`: `data.{key}`") for key, value in data.items()},
        start=SandboxSpec(image=image, workdir=options.workdir, processes=image is None),
    )


def _to_plain(value: Any, place: str) -> Any:
    """Return the value in types of JSON; numpy's scalars and arrays become numbers and lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, place) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    if callable(listed := getattr(value, "tolist", None)):
        return _to_plain(listed(), place)
    raise BadInput(f"{place} of type `{type(value).__name__}` cannot be kept")
