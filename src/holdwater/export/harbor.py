"""Exports a run as a Harbor job: a directory that Harbor's viewer reads, with a trial for each sample.

Files that a suite copied out in Harbor's layout (`agent/`, `verifier/`, `artifacts/`, `steps/`) keep it.
Trials are written one at a time. Each trial has its rewards; the job's own result has only counts and means.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import BadInput
from ..core.records import NO_USAGE, AttemptFailure, ModelUsage
from ..ledger.attempt_files import log_path, taken_out_path
from ..ledger.durable_files import open_atomic_directory, open_atomic_file, write_json
from ..ledger.reader import LedgerReader
from .atif import slug, write_trajectory
from .samples import ExportedSample, ExportOmissions, find_conversation, patch_file, read_samples

VERIFIER_FILES = ("verifier/reward.json", "verifier/reward.txt", "steps")  # of a Harbor verifier
TRIAL_FOLDERS = ("agent", "verifier", "artifacts", "steps")  # directories of a trial
PATCH_NAME = "model.patch"


def write_job(reader: LedgerReader, into: Path, omitted: ExportOmissions) -> None:
    """Write the job to a directory below `into`, replacing an earlier job of the same run."""
    path = job_path(reader, into)
    _check_target(path, reader)
    with open_atomic_directory(path) as new:
        _HarborJob(reader, new, omitted).write()


def job_path(reader: LedgerReader, into: Path) -> Path:
    """Return the directory of the job, which has the run's name."""
    return into / slug(reader.directory.path.resolve().name)


def _check_target(path: Path, reader: LedgerReader) -> None:
    """Raise if `path` exists and is not an earlier export of this run."""
    try:
        known = msgspec.json.decode((path / "result.json").read_bytes())["id"] == str(_make_id(reader))
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        known = False
    if path.exists() and not known:
        raise BadInput(f"`{path}` exists and is not an export of this run", "choose another `--out`")


def _make_id(reader: LedgerReader, *further: object) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_URL, "/".join(["holdwater:", reader.config.id, *map(str, further)]))


class _HarborJob:
    """The directory of one job."""

    def __init__(self, reader: LedgerReader, path: Path, omitted: ExportOmissions) -> None:
        self._reader = reader
        self._path = path
        self._omitted = omitted
        config = reader.config
        self._name = slug(reader.directory.path.resolve().name)
        self._agent = {"name": _shorten_spec(config.agent), "model_name": config.model}
        self._settled = self._errors = self._graded = 0
        self._score = 0.0
        self._usage: ModelUsage = NO_USAGE

    def write(self) -> None:
        with open_atomic_file(self._path / "lock.json") as lock:
            lock.write(_encode(self._lock())[:-1] + b',"trials":[')
            for place, one in enumerate(read_samples(self._reader)):
                self._write_trial(one)
                lock.write((b"," if place else b"") + _encode(self._trial_lock(one)))
            lock.write(b"]}\n")
        write_json(self._path / "config.json", self._config())
        write_json(self._path / "result.json", self._result())

    # A trial.

    def _write_trial(self, one: ExportedSample) -> None:
        name = _trial_name(one)
        path = self._path / name
        self._copy(one, path)
        config = self._trial_config(one, name)
        rewards = _rewards(one, taken_out_path(self._reader.directory, one.row.attempt))
        write_json(path / "config.json", config)
        write_json(path / "result.json", {**self._trial_result(one, name, rewards), "config": config})
        self._count(one, rewards)
        tree = find_conversation(self._reader, one.row.attempt, self._omitted)
        if tree is not None:
            write_trajectory(path / "agent" / "trajectory.json", self._reader, one.row, tree)
        if rewards is not None and not (path / "verifier" / "reward.json").exists():
            write_json(path / "verifier" / "reward.json", rewards)
        grade = one.verdict.grade
        if grade is not None and grade.detail and not (path / "verifier" / "test-stdout.txt").exists():
            with open_atomic_file(path / "verifier" / "test-stdout.txt") as file:
                file.write(grade.detail.encode())

    def _copy(self, one: ExportedSample, path: Path) -> None:
        """Copy the files of the attempt: the files that the suite copied out, the patch, the log."""
        directory, attempt = self._reader.directory, one.row.attempt
        for name in ("agent", "verifier", "artifacts"):
            (path / name).mkdir(parents=True, exist_ok=True)
        taken = taken_out_path(directory, attempt)
        for source in sorted(taken.iterdir()) if taken.is_dir() else ():
            _copy_entry(
                source,
                path / source.name if source.name in TRIAL_FOLDERS else path / "artifacts" / source.name,
            )
        for file, name in (
            (patch_file(directory, one.verdict), f"artifacts/{PATCH_NAME}"),
            (log_path(directory, attempt, one.outcome.instance), "trial.log"),
        ):
            if file.is_file():
                _copy_entry(file, path / name)
        if not (path / "artifacts" / "manifest.json").exists():
            write_json(path / "artifacts" / "manifest.json", _manifest(path / "artifacts"))

    def _trial_config(self, one: ExportedSample, name: str) -> dict[str, Any]:
        return {
            "task": {"path": slug(one.outcome.instance), "source": _shorten_spec(self._reader.config.suite)},
            "trial_name": name,
            "trials_dir": self._name,
            "agent": self._agent,
            "environment": {"type": "docker"},
            "job_id": str(_make_id(self._reader)),
        }

    def _trial_result(
        self, one: ExportedSample, name: str, rewards: dict[str, float] | None
    ) -> dict[str, Any]:
        config, verdict, row = self._reader.config, one.verdict, one.row
        usage, times = one.usage, verdict.times
        settled = row.settled or row.started
        acting = row.started + times.setup
        return {
            "id": str(_make_id(self._reader, row.attempt)),
            "task_name": one.outcome.instance,
            "trial_name": name,
            "trial_uri": f"{self._name}/{name}",
            "task_id": {"path": slug(one.outcome.instance)},
            "source": _shorten_spec(config.suite),
            "task_checksum": hashlib.sha256(one.payload).hexdigest(),
            "agent_info": {
                "name": self._agent["name"],
                "version": config.version,
                "model_info": _model(config.model) if config.model else None,
            },
            "agent_result": {
                **_count_tokens(usage),
                "metadata": {"attempt": row.number, "sample": row.sample, "outcome": one.outcome.kind},
            },
            "verifier_result": {"rewards": rewards} if rewards is not None else None,
            "exception_info": _exception(verdict.failure, settled) if verdict.failure else None,
            **_interval(row.started, settled),
            "environment_setup": _interval(row.started, acting),
            "agent_execution": _interval(acting, acting + times.acting),
            "verifier": _interval(settled - times.grading, settled),
        }

    def _trial_lock(self, one: ExportedSample) -> dict[str, Any]:
        digest = hashlib.sha256(one.payload).hexdigest()
        return {
            "task": {"name": one.outcome.instance, "type": "local", "digest": f"sha256:{digest}"},
            "agent": self._agent,
            "environment": {"type": "docker"},
            "verifier": {},
        }

    # The job.

    def _count(self, one: ExportedSample, rewards: dict[str, float] | None) -> None:
        self._settled += 1
        self._errors += one.verdict.failure is not None
        self._usage = self._usage.plus(one.usage)
        if rewards is not None:
            self._graded += 1
            self._score += one.outcome.score or 0.0

    def _config(self) -> dict[str, Any]:
        config = self._reader.config
        return {
            "job_name": self._name,
            "jobs_dir": str(self._path.parent),
            "n_attempts": config.samples,
            "n_concurrent_trials": config.slots,
            "retry": {"max_retries": config.retries},
            "agents": [self._agent],
        }

    def _lock(self) -> dict[str, Any]:
        config = self._reader.config
        return {
            "schema_version": 3,
            "created_at": _format_time(config.created),
            "n_concurrent_trials": config.slots,
            "retry": {"max_retries": config.retries},
        }

    def _result(self) -> dict[str, Any]:
        summary, usage = self._reader.summary(), self._usage
        config = self._reader.config
        stats = {
            "n_trials": self._graded,
            "n_errors": self._errors,
            "metrics": [{"mean": self._score / self._graded}] if self._graded else [],
            "pass_at_k": {rate.k: rate.value for rate in summary.pass_at},
        }
        key = "__".join(
            word for word in (self._agent["name"], config.model, _shorten_spec(config.suite)) if word
        )
        return {
            "id": str(_make_id(self._reader)),
            "started_at": _format_time(summary.started),
            "updated_at": _format_time(summary.ended or summary.started),
            "finished_at": _format_time(summary.ended) if summary.ended else None,
            "n_total_trials": summary.total or summary.planned,
            "stats": {
                "n_completed_trials": self._settled,
                "n_errored_trials": self._errors,
                "n_retries": summary.attempts - self._settled,
                "evals": {key: stats},
                **_count_tokens(usage),
            },
        }


def _trial_name(one: ExportedSample) -> str:
    """Return a name in Harbor's form, the task and seven characters: here the attempt's unique number."""
    return f"{slug(one.outcome.instance)[:32].rstrip('_-')}__{one.row.attempt:07d}"


def _rewards(one: ExportedSample, taken: Path) -> dict[str, float] | None:
    """Return the rewards, those of a Harbor verifier unchanged.

    Return None if the sample has no score: an infrastructure failure is not a zero.
    """
    if not one.scored:
        return None
    grade = one.verdict.grade
    if grade is not None and any((taken / name).exists() for name in VERIFIER_FILES):
        return grade.metrics
    return {**(grade.metrics if grade else {}), "reward": one.outcome.score or 0.0}


def _shorten_spec(spec: str) -> str:
    """Return a suite or an agent without its directory."""
    return spec.rpartition("/")[2] or spec


def _exception(failure: AttemptFailure, at: float) -> dict[str, Any]:
    return {
        "exception_type": f"{failure.where}.{failure.kind}",
        "exception_message": "; ".join(word for word in (failure.message, failure.hint) if word),
        "exception_traceback": "",
        "occurred_at": _format_time(at),
    }


def _model(name: str) -> dict[str, str | None]:
    provider, slash, rest = name.partition("/")
    return {"name": rest, "provider": provider} if slash else {"name": name, "provider": None}


def _manifest(artifacts: Path) -> list[dict[str, str]]:
    return [
        {
            "source": f"/{found.name}",
            "destination": f"artifacts/{found.name}",
            "type": "directory" if found.is_dir() else "file",
            "status": "ok",
        }
        for found in sorted(artifacts.iterdir())
    ]


def _copy_entry(source: Path, target: Path) -> None:
    """Copy a file or directory. Links stay links: their targets were never copied out of the sandbox."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _count_tokens(usage: ModelUsage) -> dict[str, Any]:
    return {
        "n_input_tokens": usage.input_tokens,
        "n_cache_tokens": usage.cached_tokens,
        "n_output_tokens": usage.output_tokens,
        "cost_usd": usage.cost,
    }


def _interval(start: float, end: float) -> dict[str, str]:
    return {"started_at": _format_time(start), "finished_at": _format_time(end)}


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


_encode = msgspec.json.Encoder().encode
