"""A program: reads a request as JSON, asks the `swebench` package, writes the answer as JSON.

It knows nothing of holdwater and is run by `reference.py`. What is printed by a test run is believed only as
far as nothing speaks against it: see `believed`.
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
MARK = ">>>>> "  # of every line that the reference takes for its own
ENVIRONMENT = {"environment": "infra_failure", "ambiguous": "ambiguous_failure"}

BAD = re.compile(r"FAIL|ERROR|\b[FE]\b|[\u2715\u2716\u2717\u2718\u00d7]|not ok|[Ff]ail")  # all ways to say so

Statuses = dict[str, str]


def main() -> None:
    request = json.load(sys.stdin)
    answers: dict[str, Any] = {"parsers": parsers, "script": script, "grade": grade}
    with contextlib.redirect_stdout(sys.stderr):
        _spare_packages()
        answer = answers[request.pop("do")](**request)
    json.dump(answer, sys.stdout)


def parsers() -> list[str]:
    """The names of the log parsers."""
    return sorted(_parsers())


def script(row: dict[str, Any]) -> str:
    """The evaluation script of a row that brings none, as the fourth version makes it."""
    constants = importlib.import_module("swebench.harness.constants")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    specs = constants.MAP_REPO_VERSION_TO_SPECS[row["repo"]][row["version"]]
    made: list[str] = scripts.make_eval_script_list(
        row, specs, "testbed", row["workdir"], row["base_commit"], row["test_patch"]
    )
    return "\n".join(made)


def grade(row: dict[str, Any], output: dict[str, Any], statuses: bool = False) -> dict[str, Any]:
    """What became of the tests; `output` says where the log is, what marks it, and how the tests ended."""
    log = Path(output["log"]).read_text(encoding="utf-8", errors="replace")
    region = _region(log, output["start"], output["end"])
    found: Statuses = {}
    reason = "the tests did not run to their end"
    if region is not None:
        found, reason = _read(row, region, output)
    answer = _resolved(row, found) if not reason else {"resolved": False, "tests": {}}
    answer |= {
        "found": not reason,
        "reason": reason,
        "failure": None if answer["resolved"] else _classified(log),
    }
    answer["begun"] = output["start"] in log
    return {**answer, "statuses": found} if statuses else answer


def _read(row: dict[str, Any], region: str, output: dict[str, Any]) -> tuple[Statuses, str]:
    """The statuses as the reference reads them, less what is doubted; or why there are none."""
    grading = importlib.import_module("swebench.harness.grading")
    spec = _spec(row)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        # Its own marks, and the status that was seen from outside in the place of any that was printed.
        file.write(f"{MARK}Start Test Output\n{region}\n{MARK}End Test Output\n")
        file.write(f"{MARK}Test Exit Code: {output['status']}\n")
        file.flush()
        found, valid = grading.get_logs_eval(spec, file.name)
    if not valid:
        return {}, "the test output says nothing, or contradicts the status that the tests ended with"
    if output["status"] and found and not any(status in FAILING for status in found.values()):
        return {}, f"the tests ended with status {output['status']}, and their output shows no failure"
    return believed(found, _failures_by_line(row, region, spec), output["report"])


def believed(found: Statuses, failures: set[str], report: str | None) -> tuple[Statuses, str]:
    """The statuses that nothing speaks against; or why none of them can be believed.

    `failures` are the tests that any single line calls failed, `report` is pytest's own, empty where it left
    none, None where it was not asked.
    """
    passed = {name for name, status in found.items() if status in PASSING}
    wrong = {name for name in passed if name in failures or name.partition("::")[0] in failures}
    if report is None or not passed:
        return {**found, **dict.fromkeys(wrong, FAILING[0])}, ""
    try:
        cases = list(ElementTree.fromstring(report).iter("testcase"))
    except ElementTree.ParseError:
        return {}, "pytest left no report of its own: it did not come to its end"
    failed = {
        _reported(case)
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    ran = {case.get("name", "").partition("[")[0] for case in cases}
    wrong |= {name for name in passed if _as_reported(name) in failed}
    unseen = {name for name in passed if "::" in name and _function(name) not in ran}
    seen = {name: status for name, status in found.items() if name not in unseen}
    return {**seen, **dict.fromkeys(wrong - unseen, FAILING[0])}, ""


def _failures_by_line(row: dict[str, Any], region: str, spec: Any) -> set[str]:
    """What the parser calls failed in any line alone: a later line of the same test does not hide it."""
    parse = _parsers()[row["log_parser"]] if row["log_parser"] else _parser_of(row["repo"])
    failed: set[str] = set()
    for line in filter(BAD.search, set(region.split("\n"))):
        try:
            failed.update(name for name, status in parse(line, spec).items() if status in FAILING)
        except Exception:  # boundary: a parser of whole logs may make nothing of a line  # noqa: BLE001
            continue
    return failed


def _region(log: str, start: str, end: str) -> str | None:
    """What was printed between the marks, without lines that look like the reference's own."""
    _, begun, rest = log.partition(start)
    region, ended, _ = rest.rpartition(end)
    if not begun or not ended:
        return None
    return "\n".join(line for line in region.split("\n") if MARK not in line)


def _resolved(row: dict[str, Any], found: Statuses) -> dict[str, Any]:
    grading = importlib.import_module("swebench.harness.grading")
    constants = importlib.import_module("swebench.harness.constants")
    by_repository = "fail_only" if row["repo"] in constants.FAIL_ONLY_REPOS else "pass_and_fail"
    kind = constants.EvalType(row["eval_type"] or by_repository)
    expected = {name: row[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    report = grading.get_eval_tests_report(found, expected, eval_type=kind)
    return {"resolved": grading.get_resolution_status(report) == "RESOLVED_FULL", "tests": report}


def _classified(log: str) -> str | None:
    """What the reference's newer versions see in a log: `infra_failure.out_of_memory`."""
    if importlib.util.find_spec("swebench.harness.infra_failure") is None:
        return None
    found = importlib.import_module("swebench.harness.infra_failure").classify_text(log)
    return f"{ENVIRONMENT.get(found[1], found[1])}.{found[0]}" if found else None


def _spec(row: dict[str, Any]) -> Any:
    """The row as the reference's parsers want it."""
    if _newer():
        fields = ("instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
        given = {name: row[name] for name in fields}
        return importlib.import_module("swebench.types").TestSpec(image="", eval_script_list=[], **given)
    return types.SimpleNamespace(**row)


def _parsers() -> dict[str, Any]:
    module = importlib.import_module("swebench.harness.log_parsers")
    if _newer():
        return dict(module.PARSER_REGISTRY)
    return {parse.__name__: parse for parse in module.MAP_REPO_TO_PARSER.values()}


def _parser_of(repo: str) -> Any:
    return importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER[repo]


def _newer() -> bool:
    return int(metadata.version("swebench").partition(".")[0]) >= 5


def _reported(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}.{case.get('name', '')}"


def _as_reported(name: str) -> str:
    """`tests/test_a.py::Some::test_b[1]` as pytest's own report names it: `tests.test_a.Some.test_b[1]`."""
    path, _, rest = name.partition("::")
    test, bracket, parameters = rest.partition("[")
    module = path.removesuffix(".py").replace("/", ".")
    return ".".join([module, *test.split("::")]) + bracket + parameters


def _function(name: str) -> str:
    return name.partition("::")[2].partition("[")[0].rpartition("::")[2]


def _spare_packages() -> None:
    """Let its modules be imported without what its packages import: 9 MB and 60 ms, not 160 MB and 2 s."""
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
