"""Real runs that do not keep everything, and `holdwater prune` on them: what goes, stays and is said."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard

import holdwater as hw
from holdwater.cli import main
from holdwater.core.errors import BadInput
from holdwater.ledger.blobs import BlobStore
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import SettledFigures

SHARED = random.Random(1).randbytes(20_000)


def own(name: str) -> bytes:
    return random.Random(name).randbytes(20_000)


def instances() -> Iterator[hw.Instance]:
    """Two that pass and two that fail."""
    return (hw.Instance(id=name) for name in ("good-1", "bad-1", "good-2", "bad-2"))


async def grade(instance: hw.Instance, sandbox: Any, answer: str) -> bool:
    return (await sandbox.read("work.txt")).decode().startswith("good")


SUITE = hw.Suite(name="keeping", instances=instances, grade=grade)


async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    """Shows the model a picture of its own and one that all share, prints, and leaves work."""
    for content in (SHARED, own(instance.id)):
        url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        await model.chat([{"role": "user", "content": [part]}])
    print(f"{instance.id} said " + "the same again and again, " * 2000)  # into its log
    await sandbox.write("work.txt", instance.id)
    return instance.id


def reply(request: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}


async def finished(path: Path, **options: Any) -> RunDirectory:
    summary = await hw.arun(SUITE, solve, out=path, policy=reply, **options)
    assert summary.outcomes == {"passed": 2, "failed": 2}, summary
    return RunDirectory(path)


def files(path: Path) -> set[str]:
    """The attempts' files: segments, logs, salvaged work."""
    names = (str(found.relative_to(path)) for found in path.rglob("0*") if found.is_file())
    return {name for name in names if name.startswith(("artifacts", "logs"))} | segments(path)


def segments(path: Path) -> set[str]:
    return {found.name for found in path.rglob("*.seg")}


def of(directory: RunDirectory, prefix: str) -> list[int]:
    """The attempts at instances whose id begins so."""
    with LedgerReader(directory) as reader:
        return [row.attempt for row in reader.attempts() if row.instance.startswith(prefix)]


def blobs(directory: RunDirectory) -> set[str]:
    return {path.stem for path in BlobStore(directory.blobs).paths()}


def hashed(content: bytes, place: Path) -> str:
    return BlobStore(place / "elsewhere").put(content)


def query(directory: RunDirectory, sql: str) -> list[Any]:
    with closing(sqlite3.connect(directory.database, isolation_level=None)) as connection:
        return connection.execute(sql).fetchall()


def prune(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["prune", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def state(path: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and when it was changed; SQLite's index of its log comes and goes."""
    found = (file for file in path.rglob("*") if not file.name.startswith("ledger.db-"))
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in found if file.is_file()}


@pytest.mark.parametrize(("keep", "kept"), [("all", 4), ("failures", 2), ("none", 0)])
async def test_a_run_keeps_the_files_that_its_keep_rule_selects(tmp_path: Path, keep: str, kept: int) -> None:
    directory = await finished(tmp_path / "run", keep=keep)

    assert len(files(directory.path)) == 3 * kept  # a segment, a log and the work of each
    assert {int(name.partition(".")[0]) for name in segments(directory.path)} == set(
        of(directory, "bad")[:kept]
    ) | (set(of(directory, "good")) if kept == 4 else set())
    found = hw.audit(directory.path)
    assert found.ok and found.dropped == 4 - kept, found
    with LedgerReader(directory) as reader:  # what the ledger has is all there
        verdicts = [row.verdict for row in reader.attempts()]
    assert [v and (v.exchanges, v.answer is not None, v.grade is not None) for v in verdicts] == [
        (2, True, True)
    ] * 4
    assert query(directory, "SELECT 1 FROM dropped WHERE bytes IS NULL OR bytes < 4096") == []


async def test_files_that_were_not_kept_are_reported_where_they_are_requested(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str((await finished(tmp_path / "run", keep="failures")).path)

    assert main(["show", run, "good-1"]) == 0
    assert "not kept (`--keep failures`)" in capfd.readouterr().out
    assert main(["transcript", run, "good-1"]) == 2
    assert "the exchanges of the attempt are not kept (`--keep failures`)" in capfd.readouterr().err
    assert main(["transcript", run, "bad-1"]) == 0
    capfd.readouterr()
    for words in (["--what", "exchanges"], ["--format", "openai-jsonl", "--all"]):
        assert main(["export", run, *words]) == 0
        told = capfd.readouterr()
        assert "left out: the exchanges of 2 attempts are not kept (`--keep failures`)" in told.err
        assert len(told.out.splitlines()) == (4 if "exchanges" in words else 2)
    assert main(["export", run, "--format", "atif", "--out", str(tmp_path / "atif")]) == 0
    assert len(list((tmp_path / "atif").glob("*.json"))) == 2
    assert main(["export", run, "--what", "attempts"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {row["instance"]: row["dropped"] for row in rows} == {
        "good-1": "failures",
        "good-2": "failures",
        "bad-1": None,
        "bad-2": None,
    }


async def test_a_replay_says_for_which_samples_the_record_is_not_kept(tmp_path: Path) -> None:
    directory = await finished(tmp_path / "run", keep="failures")

    again = await hw.areplay(directory.path, out=tmp_path / "again", suite=SUITE, agent=solve)

    assert again.outcomes == {"model": 2, "failed": 2} and again.attempts == 4
    with LedgerReader(tmp_path / "again") as reader:
        told = {row.instance: row.failure for row in reader.outcomes() if row.kind == "model"}
    assert told == dict.fromkeys(
        ("good-1", "good-2"), "the recorded replies are not kept (`--keep failures`)"
    )


async def test_a_regrade_leaves_attempts_without_kept_files_unchanged(tmp_path: Path) -> None:
    directory = await finished(tmp_path / "run", keep="failures")

    summary = await hw.aregrade(directory.path, suite=SUITE)

    assert summary.outcomes == {"passed": 2, "failed": 2} and summary.attempts == 6
    assert (summary.regrade.graded, summary.regrade.refused, summary.exit_status) == (2, 2, 0)
    with LedgerReader(directory) as reader:
        told = {row.instance: row.regrade for row in reader.outcomes() if row.regrade}
    assert told == dict.fromkeys(("good-1", "good-2"), "not regraded: not kept (`--keep failures`)")
    with pytest.raises(BadInput, match=r"not kept \(`--keep failures`\)"):
        await hw.aregrade(directory.path, suite=SUITE, only=["good-*"])
    assert hw.audit(directory.path).ok and hw.show(directory.path).state == "finished"


async def test_a_resume_removes_what_a_killed_conductor_had_dropped(tmp_path: Path) -> None:
    directory = await finished(tmp_path / "run", keep="failures")
    [first, _] = of(directory, "good")
    left = directory.logs / f"{first:06d}-good-1.log"
    left.write_text("still here")
    query(directory, f"UPDATE dropped SET bytes = NULL WHERE attempt = {first}")
    assert hw.audit(directory.path).ok  # at any time

    await hw.aresume(directory.path, suite=SUITE, agent=solve, policy=reply)

    assert not left.exists()
    assert query(directory, "SELECT 1 FROM dropped WHERE bytes IS NULL") == []


async def test_a_file_that_cannot_be_removed_is_an_event_and_nothing_else(tmp_path: Path) -> None:
    async def stubborn(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        if instance.id == "good-1":
            (tmp_path / "run" / "logs" / "000001-good-1.out").mkdir()  # a directory is no file
        return await solve(instance, sandbox, model)

    summary = await hw.arun(
        SUITE, stubborn, out=tmp_path / "run", policy=reply, keep="failures", concurrency=1
    )

    assert summary.outcomes == {"passed": 2, "failed": 2} and summary.exit_status == 0
    assert summary.events == {"retention.failed": 1}
    assert hw.audit(tmp_path / "run").ok
    (tmp_path / "run" / "logs" / "000001-good-1.out").rmdir()
    assert main(["prune", str(tmp_path / "run"), "--keep", "failures", "--yes"]) == 0
    assert len(files(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    "words",
    [["--keep", "none"], ["--keep", "failures", "--compress"], ["--remove"]],
    ids=lambda words: "".join(words),
)
async def test_without_yes_nothing_changes_and_the_forecast_comes_true(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    directory = await finished(tmp_path / "run")
    before = state(directory.path)

    foreseen = prune(capfd, str(directory.path), *words)

    assert state(directory.path) == before and not foreseen["done"]
    assert foreseen["bytes"] > 4096
    done = prune(capfd, str(directory.path), *words, "--yes")
    counts = ("attempts", "blobs", "logs", "bytes", "problem", "left")
    assert [done["runs"][0][name] for name in counts] == [foreseen["runs"][0][name] for name in counts]
    assert done["done"] and not done["runs"][0]["problem"]
    if "--remove" in words:
        assert not directory.path.exists()
        return
    assert hw.audit(directory.path).ok
    assert prune(capfd, str(directory.path), *words)["bytes"] == 0  # done is done


async def test_media_go_with_the_last_attempt_that_refers_to_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = await finished(tmp_path / "run", keep="failures")
    shared, kept, lone = (hashed(c, tmp_path) for c in (SHARED, own("bad-1"), own("good-1")))
    assert {shared, kept, lone} < blobs(directory)  # during a run media stay

    told = prune(capfd, str(directory.path), "--keep", "all", "--yes")

    assert told["runs"][0]["blobs"] == 2 and told["runs"][0]["attempts"] == 0
    assert {shared, kept} < blobs(directory) and lone not in blobs(directory)
    assert hw.audit(directory.path).ok
    assert len(list(hw.transcript(directory.path, "bad-1"))) == 2
    prune(capfd, str(directory.path), "--keep", "none", "--yes")
    assert blobs(directory) == set() and files(directory.path) == set()
    assert hw.audit(directory.path).ok


async def test_compressed_logs_have_the_same_content_and_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = await finished(tmp_path / "run")
    log = next(directory.logs.glob("*-good-1.log"))
    content = log.read_bytes()
    (directory.logs / "squeezed.new").write_text("what a killed prune left")

    told = prune(capfd, str(directory.path), "--compress", "--yes")

    assert told["runs"][0]["logs"] == 4
    assert not log.exists() and not (directory.logs / "squeezed.new").exists()
    squeezed = log.with_name(log.name + ".zst")
    with zstandard.open(squeezed) as file:
        assert file.read() == content
    assert main(["show", str(directory.path), "good-1", "--json"]) == 0
    [chapter] = json.loads(capfd.readouterr().out)["attempts"]
    assert str(squeezed) in chapter["files"]
    prune(capfd, str(directory.path), "--keep", "none", "--yes")
    assert files(directory.path) == set()  # in either form


async def test_prune_of_a_folder_leaves_held_open_broken_and_foreign_directories(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for name in ("broken", "free", "held", "linked", "open"):
        if name == "broken":
            await finished(runs / name)
        else:
            shutil.copytree(runs / "broken", runs / name)
    (runs / "broken" / "ledger.db").write_bytes(b"no database" * 1000)
    query(RunDirectory(runs / "open"), "UPDATE conductor SET state = 'interrupted'")
    shutil.move(runs / "linked" / "logs", tmp_path / "logs")
    (runs / "linked" / "logs").symlink_to(tmp_path / "logs")
    (runs / "notes").mkdir()
    (runs / "notes" / "run.json").write_text("{}")
    (runs / "elsewhere").symlink_to(runs / "held")
    before = {name: state(runs / name) for name in ("broken", "held", "open", "linked", "notes")}

    with RunDirectory(runs / "held").lock():
        before["held"] = state(runs / "held")
        foreseen = prune(capfd, str(runs), "--remove", status=1)
        told = prune(capfd, str(runs), "--remove", "--yes", status=1)
        after = {name: state(runs / name) for name in before if name != "held"} | {
            "held": state(runs / "held")
        }

    found = {Path(run["directory"]).name: run for run in told["runs"]}
    assert set(found) == {"broken", "free", "held", "linked", "open"}
    assert not (runs / "free").exists()
    assert "cannot" in found["broken"]["problem"] or "damaged" in found["broken"]["problem"]
    assert "a link is not followed" in found["linked"]["problem"]
    assert found["open"]["left"] == "interrupted, it can be resumed"
    assert f"held by process {os.getpid()}" in found["held"]["left"]
    assert [bool(run["left"]) for run in foreseen["runs"]] == [bool(run["left"]) for run in told["runs"]]
    for name in before:  # but for the lock that was looked at
        assert {k: v for k, v in after[name].items() if not k.endswith("/lock")} == {
            k: v for k, v in before[name].items() if not k.endswith("/lock")
        }, name
    assert prune(capfd, str(runs / "open"), "--remove", "--unfinished", "--yes")["bytes"] > 0
    assert not (runs / "open").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "failures"], "no such directory: `runs`"),
        (["."], "nothing to do"),
        ([".", "--remove"], "neither a run nor a folder of runs: `.`"),
        ([".", "--remove", "--older-than", "soon"], "invalid time for `--older-than`: `soon`"),
        ([".", "--remove", "--compress"], "`--remove` leaves nothing to keep or to compress"),
        (["link", "--remove"], "a link is not followed: `link`"),
    ],
)
def test_wrong_input_is_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)

    assert main(["prune", *words]) == 2

    assert f"error: {message}" in capfd.readouterr().err


async def test_the_ledger_of_an_older_version_can_be_read_and_pruned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = await finished(tmp_path / "run")
    for table in ("tag", "rollout", "orders", "dropped", "reopened", "regraded", "regrade"):
        query(directory, f"DROP TABLE {table}")
    query(directory, "ALTER TABLE conductor DROP COLUMN regrade")
    for column in SettledFigures._fields:
        query(directory, f"ALTER TABLE attempt DROP COLUMN {column}")
    query(directory, "PRAGMA user_version = 1")

    assert hw.audit(directory.path).ok
    assert prune(capfd, str(directory.path), "--keep", "failures")["runs"][0]["attempts"] == 2
    assert query(directory, "PRAGMA user_version") == [(1,)]
    prune(capfd, str(directory.path), "--keep", "failures", "--yes")
    assert hw.audit(directory.path).ok and hw.audit(directory.path).dropped == 2
