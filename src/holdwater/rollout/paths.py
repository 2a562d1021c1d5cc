"""The paths of one attempt's files in the run directory: implements `attempt_services.ArtifactPaths`."""

from __future__ import annotations

from pathlib import Path

from ..ledger.attempt_files import (
    answer_path,
    log_path,
    output_path,
    patch_path,
    salvage_path,
    taken_out_path,
)
from ..ledger.directory import RunDirectory


class AttemptPaths:
    """Builds each path on demand: most attempts of a quiet agent leave no files."""

    def __init__(self, directory: RunDirectory, attempt: int, name: str) -> None:
        self._directory = directory
        self._attempt = attempt
        self._name = name

    def log(self) -> Path:
        return log_path(self._directory, self._attempt, self._name)

    def output(self) -> Path:
        return output_path(self._directory, self._attempt, self._name)

    def salvage(self) -> Path:
        return salvage_path(self._directory, self._attempt)

    def patch(self) -> Path:
        return patch_path(self._directory, self._attempt)

    def answer(self) -> Path:
        return answer_path(self._directory, self._attempt)

    def kept_file(self, name: str) -> Path:
        return self._directory.artifacts / name

    def artifacts(self) -> Path:
        return taken_out_path(self._directory, self._attempt)
