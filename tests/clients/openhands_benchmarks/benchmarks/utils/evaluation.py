"""The base class of evaluations. The harness that runs them is left out: holdwater takes its place."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from openhands.sdk import __version__
from openhands.sdk.workspace import RemoteWorkspace
from pydantic import BaseModel, Field

from benchmarks.utils.models import EvalInstance, EvalMetadata, EvalOutput


class Evaluation(ABC, BaseModel):
    metadata: EvalMetadata
    num_workers: int = Field(default=1, ge=1)
    current_attempt: int = 1

    def model_post_init(self, context: Any) -> None:
        self.metadata.openhands_sdk_version = __version__
        place = Path(self.metadata.eval_output_dir)
        place.mkdir(parents=True, exist_ok=True)
        (place / "metadata.json").write_text(self.metadata.model_dump_json())

    @abstractmethod
    def prepare_instances(self) -> list[EvalInstance]: ...

    @abstractmethod
    def prepare_workspace(
        self, instance: EvalInstance, resource_factor: int = 1, forward_env: list[str] | None = None
    ) -> RemoteWorkspace: ...

    @abstractmethod
    def evaluate_instance(self, instance: EvalInstance, workspace: RemoteWorkspace) -> EvalOutput: ...

    def collect_failure_test_result(
        self, instance: EvalInstance, workspace: RemoteWorkspace, error: Exception
    ) -> dict[str, Any]:
        return {}
