"""Grades a patch as the reference does: apply it in a new sandbox, run the script, read the output.

A problem that the patch can cause scores zero; any other problem raises GradeFailed. The log and the report
that the reference would write are kept with the attempt.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import GradeFailed
from ...core.records import Grade, Instance
from ...ledger.durable_files import make_directory, write_private
from . import reference
from .patches import apply_patch, files_of, restore_files, summarize_output
from .rows import BenchmarkKind, SwebenchOptions
from .script import is_test, make_evaluation, replace_tests

SCRIPT = ".git/holdwater-eval.sh"
ASSET = ".git/holdwater-asset"
REPORT = "report.json"
LOG_FULL = b"\n[... cut: more than "  # marker with which a sandbox ends a truncated log
MOST_NAMED = 5  # maximum number of tests named in a grade's detail
PASSING = ("PASSED", "XFAIL")
F2P, P2P = "FAIL_TO_PASS", "PASS_TO_PASS"


class UnfitPatch(Exception):
    """The patch cannot be graded further; the reference reports this as an error."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class PatchGrader:
    """Grades patches for the rows of one suite."""

    def __init__(self, options: SwebenchOptions) -> None:
        self._options = options

    async def grade(self, instance: Instance, sandbox: GradingSandbox, patch: str) -> Grade:
        if not patch.strip():
            return Grade(passed=False, score=0.0, detail="the patch is empty", metrics={"empty_patch": 1.0})
        row = {**instance.data, "instance_id": instance.id}
        if not row["eval_script"]:
            row["eval_script"] = await reference.ask_judge(
                {"do": "script", "row": {**row, "workdir": sandbox.workdir}}
            )
        try:
            if self._options.kind is BenchmarkKind.SWT:
                return await self._grade_tests(row, sandbox, patch)
            return await self._grade_code(row, sandbox, patch)
        except UnfitPatch as error:
            metrics = {"error": 1.0, **({error.reason: 1.0} if error.reason else {})}
            return Grade(passed=False, score=0.0, detail=str(error), metrics=metrics)

    async def _grade_code(self, row: dict[str, Any], sandbox: GradingSandbox, patch: str) -> Grade:
        await self._begin_anew(sandbox, patch)
        # Restore the benchmark's own test files, so that a patch cannot replace them with weaker ones.
        await restore_files(row["base_commit"], files_of(row["test_patch"]), sandbox)
        answer = await self._run_tests(row, sandbox, "test_output.txt")
        write_private(sandbox.artifacts / REPORT, _make_report(row["instance_id"], answer))
        return _make_grade(answer)

    async def _grade_tests(self, row: dict[str, Any], sandbox: GradingSandbox, patch: str) -> Grade:
        """Grade the agent's tests: they must fail on the original code and pass with the reference fix."""
        mended = files_of(row["patch"])
        ours = [name for name in files_of(patch) if name not in mended and is_test(name)]
        if not ours:
            return Grade(passed=False, score=0.0, detail="the patch has no tests", metrics={"error": 1.0})
        theirs = [name for name in files_of(row["test_patch"]) if is_test(name)]
        row = {**row, "eval_script": replace_tests(row["eval_script"], theirs, ours), "assets": []}
        found = []
        for when in ("before", "after"):
            await self._begin_anew(sandbox, patch)
            await restore_files(row["base_commit"], mended, sandbox)
            if when == "after" and (failed := await apply_patch(row["patch"], sandbox)):
                raise GradeFailed(
                    f"the row's own `patch` does not apply: {summarize_output(failed)}",
                    kind="patch",
                    again=False,
                )
            answer = await self._run_tests(row, sandbox, f"test_output.{when}.txt", statuses=True)
            found.append({name: status in PASSING for name, status in answer["statuses"].items()})
        return _compare_tests(*found)

    async def _begin_anew(self, sandbox: GradingSandbox, patch: str) -> None:
        await sandbox.renew()
        if self._options.network is not None:
            await sandbox.set_network(self._options.network)
        if failed := await apply_patch(patch, sandbox):
            raise UnfitPatch(f"the patch does not apply: {summarize_output(failed)}")

    async def _run_tests(
        self, row: dict[str, Any], sandbox: GradingSandbox, log: str, statuses: bool = False
    ) -> dict[str, Any]:
        """Run the script of `row`; return the reference's reading of its output."""
        copies = await self._put_assets(row, sandbox)
        made = make_evaluation(row["eval_script"], secrets.token_hex(8), sandbox.workdir, copies)
        await sandbox.write(SCRIPT, made.text)
        path, timeout = sandbox.artifacts / log, self._options.timeout
        make_directory(path.parent)
        line = f"exec bash {SCRIPT} 2>&1 < /dev/null"  # one stream keeps the output in order
        result = await sandbox.run(["bash", "-c", line], timeout=timeout, log=path)
        if result.timed_out:
            raise UnfitPatch(
                f"the tests did not end within {timeout:g} s", "ambiguous_failure.tests_timed_out"
            )
        if not path.exists() or _is_cut(path):
            raise GradeFailed("the test output exceeds the log limit", kind="output", again=False)
        output = {"log": str(path), "start": made.start, "end": made.end, "status": result.exit_code}
        output["report"] = await _read(made.report, sandbox) if made.report else None
        answer: dict[str, Any] = await reference.ask_judge(
            {"do": "grade", "row": row, "output": output, "statuses": statuses}
        )
        if not answer["begun"]:
            raise GradeFailed(
                f"the script ended before the tests started: {summarize_output(result)}", kind="script"
            )
        return answer

    async def _put_assets(self, row: dict[str, Any], sandbox: GradingSandbox) -> list[str]:
        """Upload binary files that the test patch cannot carry; return commands that copy them into place."""
        if row["assets"] and not self._options.assets:
            raise GradeFailed(
                f"the tests need `{row['assets'][0]}`, which their patch cannot carry",
                hint="give the directory with such files: `?assets=DIR`, in it `<instance>/<path>`",
                kind="assets",
                again=False,
            )
        copies = []
        for number, name in enumerate(row["assets"]):
            source = Path(self._options.assets or "", row["instance_id"], name)
            if not source.is_file():
                raise GradeFailed(f"no such file for the tests: `{source}`", kind="assets", again=False)
            await sandbox.put(source, f"{ASSET}-{number}")
            copy = quote(f"{sandbox.workdir}/{ASSET}-{number}")
            copies.append(f'mkdir -p "$(dirname {quote(name)})" && cp {copy} {quote(name)}')
        return copies


def _make_grade(answer: dict[str, Any]) -> Grade:
    """Convert the reference's answer to a grade."""
    metrics = {answer["failure"]: 1.0} if answer["failure"] else {}
    if not answer["found"]:
        return Grade(passed=False, score=0.0, detail=answer["reason"], metrics=metrics)
    failed: list[str] = []
    told_of: list[str] = []
    for kind, name in ((F2P, "f2p"), (P2P, "p2p")):
        good, bad = answer["tests"][kind]["success"], answer["tests"][kind]["failure"]
        metrics |= {f"{name}_passed": float(len(good)), f"{name}_total": float(len(good) + len(bad))}
        told_of.append(f"{len(good)} of {len(good) + len(bad)} {kind}")
        failed += bad
    resolved = answer["resolved"]
    detail = f"{'resolved' if resolved else 'not resolved'}: {' and '.join(told_of)} pass"
    if failed:
        detail += f"; failed: {', '.join(failed[:MOST_NAMED])}{', ...' if len(failed) > MOST_NAMED else ''}"
    return Grade(passed=resolved, score=float(resolved), detail=detail, metrics=metrics)


def _compare_tests(before: dict[str, bool], after: dict[str, bool]) -> Grade:
    """Grade the agent's tests: at least one fails before and passes after the fix; none fails after it."""
    shown = [name for name, passed in after.items() if passed and not before.get(name, False)]
    wrong = [name for name, passed in after.items() if not passed]
    kept = sum(passed and before.get(name, False) for name, passed in after.items())
    good = bool(shown) and not wrong
    detail = f"{len(shown)} tests fail before and pass after the fix, {len(wrong)} fail after it"
    metrics = {"fail_to_pass": len(shown), "pass_to_pass": kept, "to_fail": len(wrong), "tests": len(after)}
    return Grade(
        passed=good, score=float(good), detail=detail, metrics={name: float(n) for name, n in metrics.items()}
    )


def _make_report(name: str, answer: dict[str, Any]) -> bytes:
    """Return `report.json` as the reference writes it."""
    kind, _, reason = (answer["failure"] or "").partition(".")
    report = {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": answer["found"],
        "resolved": answer["resolved"],
        "infra_failure": not answer["found"] and kind == "infra_failure",
        **({"infra_failure_reason": reason} if reason and not answer["found"] else {}),
        **({"tests_status": answer["tests"]} if answer["found"] else {}),
    }
    return msgspec.json.format(msgspec.json.encode({name: report}), indent=4)


async def _read(path: str, sandbox: GradingSandbox) -> str:
    try:
        return (await sandbox.read(path)).decode("utf-8", "replace")
    except OSError:
        return ""


def _is_cut(log: Path) -> bool:
    """Return whether the log was truncated."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200))
        return LOG_FULL in file.read()
