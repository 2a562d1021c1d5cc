"""The records of an evaluation: fields and types are those of the public interface."""

from typing import Any, Literal

from openhands.sdk import LLM, Event
from openhands.sdk.critic import CriticBase
from openhands.sdk.llm import Metrics
from openhands.sdk.utils.models import OpenHandsModel
from pydantic import BaseModel, Field


class EvalMetadata(BaseModel):
    llm: LLM
    dataset: str
    dataset_split: str = "test"
    max_iterations: int
    eval_output_dir: str
    details: dict[str, Any] | None = None
    prompt_path: str | None = None
    env_setup_commands: list[str] | None = None
    eval_limit: int = 0
    n_critic_runs: int = Field(default=1, ge=1)
    critic: CriticBase
    selected_instances_file: str | None = None
    max_retries: int = Field(default=3, ge=0)
    workspace_type: Literal["docker", "remote", "apptainer"] = "docker"
    openhands_sdk_version: str | None = None


class EvalInstance(BaseModel):
    id: str
    data: dict[str, Any]


class EvalOutput(OpenHandsModel):
    instance_id: str
    attempt: int = Field(default=1, ge=1)
    test_result: dict[str, Any]
    instruction: str | None = None
    metadata: EvalMetadata | None = None
    history: list[Event] = Field(default_factory=list)
    metrics: Metrics | None = None
    error: str | None = None
    instance: dict[str, Any] | None = None
