"""Specs of evaluations, their metadata, and the grades of their outputs; without OpenHands' packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdwater.core.authoring import CriticInput
from holdwater.core.errors import BadInput, GradeFailed
from holdwater.core.records import AttemptFailure, FailureOrigin, Instance
from holdwater.evaluation import LoadedEvaluation, make_absolute, parse_evaluation
from holdwater.suite.openhands import ask_critic, judge_output, openhands, take_patch

MODULE = """
from pydantic import BaseModel

class EvalInstance(BaseModel):
    id: str
    data: dict

class EvalMetadata(BaseModel):
    llm: dict
    dataset: str
    max_iterations: int
    eval_output_dir: str
    critic: dict
    details: dict | None = None
    prompt_path: str | None = None

class Good(BaseModel):
    metadata: EvalMetadata
    def prepare_instances(self):
        import datetime
        class Array:
            def tolist(self):
                return [1, 2]
        data = {"day": datetime.date(2026, 1, 2), "array": Array(), "nested": {"x": (1, None)}}
        return [EvalInstance(id="one", data=data), EvalInstance(id="two", data=self.metadata.details or {})]
    def prepare_workspace(self, instance): ...
    def evaluate_instance(self, instance, workspace): ...

class Odd(Good):
    def prepare_instances(self):
        return [EvalInstance(id="odd", data={"thing": object()})]

class Poor(BaseModel):
    def prepare_instances(self): ...

number = 1
"""
INSTANCE = Instance(id="one")


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "bench.py"
    path.write_text(MODULE)
    return f"openhands:{path}"


def test_a_spec_is_parsed_into_its_parts() -> None:
    spec = parse_evaluation("openhands:a.b:C?image=x/{id}&workdir=/repo&prepare=no&dataset=d&details={}")

    assert (spec.place, spec.image, spec.workdir, spec.prepare) == ("a.b:C", "x/{id}", "/repo", False)
    assert spec.fields == {"dataset": "d", "details": "{}"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("prepare=maybe", "invalid option `prepare` of `openhands:a:C`: `maybe`"),
        ("workdir=x", "option `workdir` of `openhands:a:C` is not absolute: `x`"),
        ("image=", "empty option of `openhands:a:C`: `image`"),
        ("max_retries=3", "not an option of `openhands:a:C`: `max_retries`"),
    ],
)
def test_an_invalid_option_is_named(query: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse_evaluation(f"openhands:a:C?{query}")

    assert raised.value.message == message


def test_paths_of_a_spec_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    spec = make_absolute("openhands:bench.py:Good?metadata=m.json&dataset=a/b")

    assert parse_evaluation(spec).place == f"{tmp_path}/bench.py:Good"
    assert parse_evaluation(spec).metadata == f"{tmp_path}/m.json"
    assert parse_evaluation(spec).fields == {"dataset": "a/b"}
    assert make_absolute("openhands:a.b:C") == "openhands:a.b:C"


def test_the_metadata_comes_from_defaults_file_and_spec(module: str, tmp_path: Path) -> None:
    given = {"dataset": "of the file", "max_iterations": 7, "eval_output_dir": "/elsewhere"}
    (tmp_path / "m.json").write_text(json.dumps(given))
    loaded = LoadedEvaluation(f'{module}:Good?metadata={tmp_path}/m.json&max_iterations=9&details={{"a": 1}}')

    metadata = loaded.open(tmp_path / "out", {"model": "openai/m"}).metadata

    assert (metadata.dataset, metadata.max_iterations, metadata.details) == ("of the file", 9, {"a": 1})
    assert metadata.eval_output_dir == str(tmp_path / "out")
    assert metadata.critic == {"kind": "AgentFinishedCritic"}
    assert metadata.llm == {"usage_id": "agent", "model": "openai/m"}


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("number", "not an evaluation: `{place}:number` is of type `int`"),
        ("Poor", "not an evaluation: `{place}:Poor` has no `prepare_workspace`"),
        ("Good?max_iteration=1", "`openhands:{place}:Good`: the metadata has no field `max_iteration`"),
    ],
)
def test_what_is_no_evaluation_is_refused(module: str, rest: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        LoadedEvaluation(f"{module}:{rest}")

    assert raised.value.message == message.format(place=module.removeprefix("openhands:"))


def test_an_invalid_field_of_the_metadata_is_named(module: str, tmp_path: Path) -> None:
    loaded = LoadedEvaluation(f"{module}:Good?max_iterations=many")

    with pytest.raises(BadInput, match="field `max_iterations` of the metadata: Input should be a valid int"):
        loaded.open(tmp_path, {})


def test_instances_have_plain_data_and_the_workspaces_directory(module: str) -> None:
    suite = openhands(f'{module}:Good?details={{"k": 1}}&image=example.org/{{id}}:1')

    one, two = suite.instances()

    assert one.data == {"day": "2026-01-02", "array": [1, 2], "nested": {"x": [1, None]}}
    assert (one.start.image, one.start.workdir) == ("example.org/one:1", "/workspace")
    assert two.data == {"k": 1}
    assert suite.defaults.sandbox == "docker"
    assert suite.check is not None
    suite.check()


def test_data_that_cannot_be_kept_is_named(module: str) -> None:
    with pytest.raises(BadInput, match=r"instance `odd`: `data.thing` of type `object` cannot be kept"):
        list(openhands(f"{module}:Odd").instances())


def output(success: bool = True, score: float = 1.0, **result: Any) -> dict[str, Any]:
    return {"test_result": result, "verdict": {"success": success, "score": score, "message": "so"}}


def judge(answer: Any, where: FailureOrigin | None = None) -> Any:
    failure = AttemptFailure(where=where, kind="x", message="x") if where else None
    return judge_output(INSTANCE, None, "", SimpleNamespace(answer=answer, failure=failure))  # type: ignore[arg-type]


def test_an_output_passes_by_its_critic_and_its_own_score() -> None:
    assert judge(output()).passed
    assert not judge(output(success=False, score=0.0)).passed
    assert judge(output(score=1.0)).score == 1.0
    assert (judge(output(**{"score": True})).passed, judge(output()).detail) == (True, "so")


def test_a_limit_without_output_is_a_zero_and_other_failures_are_not() -> None:
    assert judge(None, FailureOrigin.LIMIT).score == 0.0
    with pytest.raises(GradeFailed):
        judge(None, FailureOrigin.SANDBOX)


def test_the_patch_is_the_outputs_or_what_a_failure_saved(tmp_path: Path) -> None:
    sandbox: Any = SimpleNamespace(artifacts=tmp_path)

    assert take_patch(INSTANCE, sandbox, output(git_patch="diff")) == "diff"
    assert take_patch(INSTANCE, sandbox, None) == ""
    (tmp_path / "evaluation.json").write_text('{"test_result": {"git_patch": "saved"}}')
    assert take_patch(INSTANCE, sandbox, None) == "saved"


def test_their_critic_decides_on_another_attempt() -> None:
    failure = AttemptFailure(where=FailureOrigin.LIMIT, kind="timeout", message="late")

    assert ask_critic(INSTANCE, CriticInput(answer=output()))
    assert not ask_critic(INSTANCE, CriticInput(answer=output(success=False)))
    assert not ask_critic(INSTANCE, CriticInput(answer=None, failure=failure))


def test_specs_are_loaded_without_their_packages() -> None:
    from holdwater.suite import loader

    assert loader.load("openhands:no.such:Class").name == "Class"
    assert "openhands.sdk" not in sys.modules
