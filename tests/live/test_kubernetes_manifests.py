"""The manifests in `deploy/kubernetes` fit the published schema of Kubernetes, and use options that exist."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.cli.run_flags import ResumeFlags, RunFlags
from holdwater.cli.sandboxd import SandboxServerFlags

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deploy" / "kubernetes"
PYTHON = ROOT / ".clients" / "schemas" / "bin" / "python"
CHECK = """
import pathlib, sys, yaml, kubernetes_validate
for path in sys.argv[1:]:
    for document in yaml.safe_load_all(pathlib.Path(path).read_text()):
        kubernetes_validate.validate(document, "1.36", strict=True)
        print(document["kind"])
"""


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        reason = "the schema of Kubernetes is not installed: `scripts/clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    words = [str(PYTHON), "-c", CHECK, *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True, timeout=stretch(60), check=False)


def test_the_manifests_fit_the_schema() -> None:
    done = check(*sorted(PLACE.glob("*.yaml")))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Job", "PersistentVolumeClaim", "Job", "Service", "StatefulSet"]


def test_a_manifest_with_a_wrong_field_does_not_fit(tmp_path: Path) -> None:
    wrong = tmp_path / "job.yaml"
    text = (PLACE / "job.yaml").read_text()
    wrong.write_text(text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))

    done = check(wrong)

    assert done.returncode == 1 and "terminationGraceSeconds" in done.stderr


def test_the_manifests_use_flags_that_exist_and_enough_time_to_drain() -> None:
    kinds = (RunFlags, ResumeFlags, SandboxServerFlags)
    known = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}
    for path in PLACE.glob("*.yaml"):
        text = path.read_text()
        assert set(re.findall(r"--([a-z][a-z-]+)", text)) <= known | {"out", "json", "quiet"}, path
        waits = {int(found) for found in re.findall(r"--grace[,\s\"]+(\d+)", text)}
        (whole,) = {int(found) for found in re.findall(r"terminationGracePeriodSeconds: (\d+)", text)}
        assert waits and max(waits) + 40 <= whole
