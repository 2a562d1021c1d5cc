"""Exports a run in the format of the OpenHands benchmarks: rows of all rounds, conversations, costs, logs.

A row with a grade or a patch is in `output.jsonl`, also after a failure, so that it is scored; other rows are
in `output_errors.jsonl`. Each round of `--attempts` has a file of its own, whose rows have the cost of all
attempts of the round. Rows are written event by event: see `openhands_events.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from ..conversation.trajectory import ExchangeTree, read_thread_turns
from ..core.config import CriticKind
from ..core.policy import verdict_kind
from ..core.records import NO_USAGE, ModelUsage, Verdict
from ..dialect import find_dialect
from ..ledger.attempt_files import read_answer_json
from ..ledger.durable_files import open_atomic_directory, open_atomic_file, write_json
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow
from .openhands_archive import ConversationArchive, copy_logs
from .openhands_events import OpenHandsEvents, encode_json
from .openhands_tools import find_sdk_tools
from .samples import ExportedSample, ExportOmissions, find_conversation, read_first_samples, read_patch
from .swebench import make_swebench_report, write_predictions

OUTPUT_NAME = "output.jsonl"
ERRORS_NAME = "output_errors.jsonl"
ROUND_NAME = "output.critic_attempt_{}.jsonl"
CRITIC_NAMES: dict[str, str] = {
    CriticKind.FINISHED_WITH_PATCH: "AgentFinishedCritic",
    CriticKind.PATCH: "EmptyPatchCritic",
}
EVALUATION = "openhands:"  # the beginning of the suite's spec if the suite is one of their evaluations
_answers = msgspec.json.Decoder(dict[str, Any])


def write_openhands(reader: LedgerReader, into: Path, omitted: ExportOmissions) -> None:
    """Write the files to `into`. Rows and archives replace earlier ones once all of them are complete."""
    with ExitStack() as files:
        export = BenchmarkExport(reader, into, omitted, files)
        for sample in read_first_samples(reader, omitted):
            export.write_sample(sample)
        predictions = files.enter_context(open_atomic_file(into / "output.swebench.jsonl"))
        omitted.patches = write_predictions(reader, predictions)
    for path in into.glob(ROUND_NAME.format("*")):
        if path.name not in export.costs:  # of an earlier export
            path.unlink()
    for name, content in (
        ("output.report.json", make_swebench_report(reader)),
        ("metadata.json", _render_metadata(reader, into, export.critic)),
        ("cost_report.jsonl", _render_costs(reader, into, export)),
    ):
        write_json(into / name, content)


class RoundResult(NamedTuple):
    """A round of a sample: the attempt that stands for it, and the usage of all its attempts."""

    sample: ExportedSample
    spent: ModelUsage
    is_chosen: bool  # whether the sample's outcome comes from this round
    answer: dict[str, Any]  # the result of their evaluation, empty for any other suite


class FileCost(msgspec.Struct):
    """The sums over the rows of one file."""

    lines: int = 0
    nanodollars: int = 0
    timed_lines: int = 0  # rows with at least two events
    seconds: float = 0.0

    def render(self, name: str) -> dict[str, Any]:
        average = self.seconds / self.timed_lines if self.timed_lines else 0.0
        times = {
            "average_duration": average,
            "total_duration": self.seconds,
            "total_lines": self.lines,
            "lines_with_duration": self.timed_lines,
        }
        cost = self.nanodollars / 1e9
        return {"filename": name, "lines": self.lines, "cost": cost, "time_statistics": times}


class BenchmarkExport:
    """The rows of an export, in the files of their rounds and in the files of the results."""

    def __init__(self, reader: LedgerReader, into: Path, omitted: ExportOmissions, files: ExitStack) -> None:
        self._reader = reader
        self._into = into
        self._omitted = omitted
        self._files = files
        self._outs: dict[str, BinaryIO] = {}  # bound: two, and one for each round
        self._conversations = files.enter_context(open_atomic_directory(into / "conversations"))
        self._logs = files.enter_context(open_atomic_directory(into / "logs"))
        self.costs: dict[str, FileCost] = {}  # by the name of the file
        self.critic: dict[str, Any] | None = None  # of their evaluation
        for name in (OUTPUT_NAME, ERRORS_NAME):
            self._find_out(name)

    def write_sample(self, sample: ExportedSample) -> None:
        """Write a row for each round of the sample; its conversation is that of the chosen row."""
        rows = [row for row in self._reader.attempts(sample.row.row) if row.sample == sample.row.sample]
        for result in self._list_rounds(sample, rows):
            self._write_row(result, rows)
        copy_logs(self._reader, rows, self._logs)

    def _list_rounds(self, sample: ExportedSample, rows: Sequence[AttemptRow]) -> Iterator[RoundResult]:
        for number in sorted({row.round for row in rows}):
            settled = [row for row in rows if row.round == number and row.verdict is not None]
            if not settled:
                continue
            is_chosen = number == sample.row.round
            row = sample.row if is_chosen else max(settled, key=_rank)
            verdict = sample.verdict if is_chosen else self._reader.whole_verdict(row.attempt)
            spent = NO_USAGE
            for one in settled:
                spent = spent.plus(one.verdict.usage if one.verdict else NO_USAGE)
            round_sample = sample._replace(row=row, verdict=verdict)
            yield RoundResult(round_sample, spent, is_chosen, self._read_answer(verdict))

    def _read_answer(self, verdict: Verdict) -> dict[str, Any]:
        if not self._reader.config.suite.startswith(EVALUATION):
            return {}
        text = read_answer_json(self._reader.directory, verdict)
        answer = {} if text is None or text == "null" else _answers.decode(text)
        self.critic = self.critic or answer.get("critic")
        return answer

    def _write_row(self, result: RoundResult, rows: Sequence[AttemptRow]) -> None:
        """Write one line, event by event, to every file that has it."""
        sample, number = result.sample, result.sample.row.round
        patch = read_patch(self._reader, sample.verdict)
        names = [ROUND_NAME.format(number)]
        if result.is_chosen:
            names.append(OUTPUT_NAME if sample.scored or patch else ERRORS_NAME)
        outs = [self._find_out(name) for name in names]
        _write(outs, encode_json(self._render_start(result, patch))[:-1] + b',"history":[')
        seconds = self._write_history(result, outs)
        _write(outs, b'],"runtime_runs":[' + b",".join(self._render_runs(number, rows)) + b"]}\n")
        for name in names:
            self._add_cost(name, result.spent, seconds)

    def _find_out(self, name: str) -> BinaryIO:
        if name not in self._outs:
            self._outs[name] = self._files.enter_context(open_atomic_file(self._into / name))
            self.costs[name] = FileCost()
        return self._outs[name]

    def _add_cost(self, name: str, spent: ModelUsage, seconds: float | None) -> None:
        cost = self.costs[name]
        cost.lines += 1
        cost.nanodollars += spent.nanodollars
        if seconds is not None:
            cost.timed_lines += 1
            cost.seconds += seconds

    def _render_start(self, result: RoundResult, patch: str | None) -> dict[str, Any]:
        sample, answer = result.sample, result.answer
        failure = sample.verdict.failure
        return {
            "instance_id": sample.outcome.instance,
            "attempt": sample.row.round,
            "test_result": self._render_result(result, patch),
            "instruction": answer.get("instruction") or sample.instance.instruction,
            "metadata": None,  # equal for all rows: see `metadata.json`
            "metrics": _render_metrics(self._reader.config.model or "", result.spent),
            "error": f"{failure.where}: {failure.message}" if failure else None,
            "instance": sample.instance.data,
        }

    def _render_result(self, result: RoundResult, patch: str | None) -> dict[str, Any]:
        verdict, grade = result.sample.verdict, result.sample.verdict.grade
        own: dict[str, Any] = {"git_patch": patch or "", **result.answer.get("test_result", {})}
        if patch is not None and verdict.failure is not None:
            own["git_patch_captured_on_error"] = True
        if grade is not None:
            own |= msgspec.structs.asdict(grade)
        text = None if result.answer else read_answer_json(self._reader.directory, verdict)
        if text is not None:
            own["answer"] = msgspec.Raw(text.encode())
        kind = verdict_kind(verdict.failure, grade.passed if grade else None)
        return {**own, "outcome": result.sample.outcome.kind if result.is_chosen else kind}

    def _write_history(self, result: RoundResult, outs: list[BinaryIO]) -> float | None:
        """Write the events; return the seconds from the first to the last, None without two of them."""
        config, sample = self._reader.config, result.sample
        tree = find_conversation(self._reader, sample.row.attempt, self._omitted)
        if tree is None:
            return None
        thread = tree.threads()[0]
        tools = _find_tools(tree, thread.numbers[0])
        events = OpenHandsEvents(f"{config.id}-{tree.attempt}", tree.blobs, tools)
        turns = read_thread_turns(tree, thread)
        times: list[datetime] = []  # of the first and the last event
        with ExitStack() as stack:
            archive = ConversationArchive(self._conversations, sample, config) if result.is_chosen else None
            if archive is not None:
                stack.enter_context(archive)
            for place, event in enumerate(events.render_turns(turns)):
                content = encode_json(event)
                _write(outs, (b"," if place else b"") + content)
                at = datetime.fromisoformat(event["timestamp"])
                times = [min([at, *times]), max([at, *times])]
                if archive is not None:
                    archive.add_event(event["id"], content)
            if archive is not None:
                metrics = _render_metrics(config.model or "", sample.usage)
                archive.add_state(metrics, sorted(tools), is_finished=events.is_finished)
        return (times[1] - times[0]).total_seconds() if events.count > 1 else None

    def _render_runs(self, number: int, rows: Sequence[AttemptRow]) -> Iterator[bytes]:
        """Yield every attempt up to this round, with its resource factor, round and number of the retry."""
        tries: dict[int, int] = {}
        for row in rows:
            if row.regrades is not None or row.round > number:
                continue
            tries[row.round] = tries.get(row.round, 0) + 1
            run = {
                "runtime_id": f"{self._reader.config.id}-{row.attempt}",
                "resource_factor": row.scale,
                "critic_attempt": row.round,
                "retry": tries[row.round],
                "started_at": datetime.fromtimestamp(row.started, UTC),
            }
            yield encode_json(run)


def _find_tools(tree: ExchangeTree, number: int) -> frozenset[str]:
    """Return the tools of a request of the SDK's agent; none for another agent."""
    dialect = find_dialect(tree.exchange(number).dialect)
    return find_sdk_tools(dialect.parse_tools(tree.head(number)))


def _write(outs: Sequence[BinaryIO], content: bytes) -> None:
    for out in outs:
        out.write(content)


def _rank(row: AttemptRow) -> tuple[bool, int]:
    """Return the sort key of an attempt in a round without the sample's outcome: graded ones are highest."""
    return row.verdict is not None and row.verdict.grade is not None, row.attempt


def _render_metrics(model: str, usage: ModelUsage) -> dict[str, Any]:
    return {
        "model_name": model or "default",
        "accumulated_cost": usage.nanodollars / 1e9,
        "accumulated_token_usage": {
            "model": model,
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "cache_read_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
    }


def _render_costs(reader: LedgerReader, into: Path, export: BenchmarkExport) -> dict[str, Any]:
    """Return the report of their cost script, and the cost of the whole run with all samples."""
    rounds = {name: cost for name, cost in sorted(export.costs.items()) if re.match(r"output\.critic_", name)}
    main = export.costs[OUTPUT_NAME]
    total = sum(cost.nanodollars for cost in rounds.values()) / 1e9
    return {
        "directory": str(into),
        "timestamp": datetime.fromtimestamp(reader.summary().ended or reader.config.created, UTC),
        "main_output": main.render(OUTPUT_NAME),
        "critic_files": [cost.render(name) for name, cost in rounds.items()],
        "summary": {
            "total_cost": total,
            "total_duration": sum(cost.seconds for cost in rounds.values()),
            "only_main_output_cost": main.nanodollars / 1e9,
            "sum_critic_files": total,
            "whole_run_cost": reader.counts().usage.nanodollars / 1e9,
        },
        "proxy_cost_summary": {
            "total_proxy_cost": 0.0,
            "zero_proxy_cost_instances": 0,
            "only_main_output_proxy_cost": 0.0,
            "sum_critic_files_proxy_cost": 0.0,
        },
    }


def _render_metadata(reader: LedgerReader, into: Path, critic: dict[str, Any] | None) -> dict[str, Any]:
    config = reader.config
    return {
        "llm": {"model": config.model or "none", "usage_id": "agent"},
        "dataset": config.suite,
        "dataset_split": "test",
        "max_iterations": config.limits.requests or 0,
        "eval_output_dir": str(into),
        "eval_limit": config.limit or 0,
        "n_critic_runs": config.attempts,
        "critic": critic or {"kind": CRITIC_NAMES.get(config.critic, "PassCritic")},
        "max_retries": config.retries,
        "details": {
            "run": config.id,
            "agent": config.agent,
            "critic": config.critic,
            "samples": config.samples,
            "holdwater": config.version,
        },
    }
