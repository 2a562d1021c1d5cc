"""A program that reads a request as JSON, calls the `swebench` package and writes the answer as JSON.

`reference.py` runs it; it does not import holdwater. The output of a test run is untrusted: `filter_statuses`
keeps only statuses that no other evidence contradicts.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
import sys
import tempfile
import types
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path
from typing import Any

FAILING = ("FAILED", "ERROR")
PASSING = ("PASSED", "XFAIL")
MARK = ">>>>> "  # prefix of every line that the reference treats as its own
ENVIRONMENT = {"environment": "infra_failure", "ambiguous": "ambiguous_failure"}

BAD = re.compile(
    r"FAIL|ERROR|\b[FE]\b|[\u2715\u2716\u2717\u2718\u00d7]|not ok|[Ff]ail"
)  # ways to report a failure

Statuses = dict[str, str]


def main() -> None:
    request = json.load(sys.stdin)
    answers: dict[str, Any] = {"parsers": parsers, "script": script, "grade": grade}
    with contextlib.redirect_stdout(sys.stderr):
        _spare_packages()
        answer = answers[request.pop("do")](**request)
    json.dump(answer, sys.stdout)


def parsers() -> list[str]:
    """Return the names of the log parsers."""
    return sorted(_parsers())


def script(row: dict[str, Any]) -> str:
    """Return the evaluation script for a row that has none, as version 4 of `swebench` makes it."""
    constants = importlib.import_module("swebench.harness.constants")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    specs = constants.MAP_REPO_VERSION_TO_SPECS[row["repo"]][row["version"]]
    made: list[str] = scripts.make_eval_script_list(
        row, specs, "testbed", row["workdir"], row["base_commit"], row["test_patch"]
    )
    return "\n".join(made)


def grade(row: dict[str, Any], output: dict[str, Any], statuses: bool = False) -> dict[str, Any]:
    """Return the test results; `output` names the log file, its marks and the tests' exit status."""
    log = Path(output["log"]).read_text(encoding="utf-8", errors="replace")
    region = _region(log, output["start"], output["end"])
    found: Statuses = {}
    reason = "the tests did not run to their end"
    if region is not None:
        found, reason = _read(row, region, output)
    answer = _judge_tests(row, found) if not reason else {"resolved": False, "tests": {}}
    answer |= {
        "found": not reason,
        "reason": reason,
        "failure": None if answer["resolved"] else _classify_log(log),
    }
    answer["begun"] = output["start"] in log
    return {**answer, "statuses": found} if statuses else answer


def _read(row: dict[str, Any], region: str, output: dict[str, Any]) -> tuple[Statuses, str]:
    """Return the statuses that the reference reads, minus contradicted ones; or why there are none."""
    grading = importlib.import_module("swebench.harness.grading")
    spec = _make_spec(row)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        # Write the reference's own marks, and the exit status that we observed instead of any printed one.
        file.write(f"{MARK}Start Test Output\n{region}\n{MARK}End Test Output\n")
        file.write(f"{MARK}Test Exit Code: {output['status']}\n")
        file.flush()
        found, valid = grading.get_logs_eval(spec, file.name)
    if not valid:
        return {}, "the test output has no results, or contradicts the exit status of the tests"
    if output["status"] and found and not any(status in FAILING for status in found.values()):
        return {}, f"the tests ended with status {output['status']}, and their output shows no failure"
    return filter_statuses(found, _failures_by_line(row, region, spec), output["report"])


def filter_statuses(found: Statuses, failures: set[str], report: str | None) -> tuple[Statuses, str]:
    """Return the statuses that no evidence contradicts; or a reason why none of them can be trusted.

    `failures` are the tests that any single line reports as failed. `report` is pytest's own report: empty if
    pytest wrote none, None if it was not requested.
    """
    passed = {name for name, status in found.items() if status in PASSING}
    wrong = {name for name in passed if name in failures or name.partition("::")[0] in failures}
    if report is None or not passed:
        return {**found, **dict.fromkeys(wrong, FAILING[0])}, ""
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:
        return {}, "pytest wrote no report: it did not run to its end"
    failed = {
        f"{case.get('classname', '')}.{case.get('name', '')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    ran = {case.get("name", "").partition("[")[0] for case in cases}
    wrong |= {name for name in passed if _to_case_name(name) in failed}
    unseen = {name for name in passed if "::" in name and _function_name(name) not in ran}
    seen = {name: status for name, status in found.items() if name not in unseen}
    return {**seen, **dict.fromkeys(wrong - unseen, FAILING[0])}, ""


def _failures_by_line(row: dict[str, Any], region: str, spec: Any) -> set[str]:
    """Return the tests that any single line reports as failed, even if a later line says otherwise."""
    module = importlib.import_module("swebench.harness.log_parsers")
    parser = row["log_parser"]
    parse = _parsers()[parser] if parser else module.MAP_REPO_TO_PARSER[row["repo"]]
    failed: set[str] = set()
    for line in filter(BAD.search, set(region.split("\n"))):
        try:
            failed.update(name for name, status in parse(line, spec).items() if status in FAILING)
        except Exception:  # boundary: a parser for whole logs may raise on a single line  # noqa: BLE001
            continue
    return failed


def _region(log: str, start: str, end: str) -> str | None:
    """Return the output between the marks, without lines that imitate the reference's own."""
    _, begun, rest = log.partition(start)
    region, ended, _ = rest.rpartition(end)
    if not begun or not ended:
        return None
    return "\n".join(line for line in region.split("\n") if MARK not in line)


def _judge_tests(row: dict[str, Any], found: Statuses) -> dict[str, Any]:
    grading = importlib.import_module("swebench.harness.grading")
    constants = importlib.import_module("swebench.harness.constants")
    by_repository = "fail_only" if row["repo"] in constants.FAIL_ONLY_REPOS else "pass_and_fail"
    kind = constants.EvalType(row["eval_type"] or by_repository)
    expected = {name: row[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    report = grading.get_eval_tests_report(found, expected, eval_type=kind)
    return {"resolved": grading.get_resolution_status(report) == "RESOLVED_FULL", "tests": report}


def _classify_log(log: str) -> str | None:
    """Return the failure class from newer versions of the reference: `infra_failure.out_of_memory`."""
    if importlib.util.find_spec("swebench.harness.infra_failure") is None:
        return None
    found = importlib.import_module("swebench.harness.infra_failure").classify_text(log)
    return f"{ENVIRONMENT.get(found[1], found[1])}.{found[0]}" if found else None


def _make_spec(row: dict[str, Any]) -> Any:
    """Convert the row to the type that the reference's parsers expect."""
    if _is_newer():
        fields = ("instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
        given = {name: row[name] for name in fields}
        return importlib.import_module("swebench.types").TestSpec(image="", eval_script_list=[], **given)
    return types.SimpleNamespace(**row)


def _parsers() -> dict[str, Any]:
    module = importlib.import_module("swebench.harness.log_parsers")
    if _is_newer():
        return dict(module.PARSER_REGISTRY)
    return {parse.__name__: parse for parse in module.MAP_REPO_TO_PARSER.values()}


def _is_newer() -> bool:
    return int(metadata.version("swebench").partition(".")[0]) >= 5


def _to_case_name(name: str) -> str:
    """Convert `tests/test_a.py::Some::test_b[1]` to pytest's name `tests.test_a.Some.test_b[1]`."""
    path, _, rest = name.partition("::")
    test, bracket, parameters = rest.partition("[")
    module = path.removesuffix(".py").replace("/", ".")
    return ".".join([module, *test.split("::")]) + bracket + parameters


def _function_name(name: str) -> str:
    return name.partition("::")[2].partition("[")[0].rpartition("::")[2]


def _spare_packages() -> None:
    """Import its modules without the imports of its packages: 9 MB and 60 ms instead of 160 MB and 2 s."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("swebench is not installed")
    place = Path(next(iter(spec.submodule_search_locations)))
    for name, path in (("swebench", place), ("swebench.harness", place / "harness")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
