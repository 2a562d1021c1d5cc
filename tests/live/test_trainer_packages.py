"""The trainers' packages have the recorded contracts, and the adapters work with their types."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.live.test_trainers import FLAGS, SUITE
from tests.server_harness import server
from tests.trainer_contracts import load_record
from tests.trainer_programs import DRAWERS, ROOT, find_trainers
from tests.wait_bounds import stretch

pytestmark = pytest.mark.proof


def run_python(*words: str, url: str = "") -> str:
    """Run words with the Python that has the trainers; return its output."""
    env = {**os.environ, "HOLDWATER_TEST_TRAINERS": url, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [find_trainers(), *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=stretch(600)
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_the_contracts_are_those_of_the_packages() -> None:
    packages = run_python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()

    assert json.loads(run_python("tests/trainer_contracts.py", packages)) == load_record()


@pytest.mark.timeout(1200)
def test_the_adapters_work_with_the_types_of_the_packages(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=")
    with server(tmp_path, *FLAGS, suite=SUITE) as serving:
        output = run_python(*words, "tests/live/test_trainers.py", url=serving.url)

    assert "10 passed" in output, output


EXAMPLES = [
    text
    for text in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    if "from holdwater.trainers" in text
]
ON_A_CPU = "use_cpu=True, bf16=False, report_to='none', save_strategy='no'"
# The example of `GRPOTrainer` trains two steps of a small model; the others have no vLLM and no engines here.
GRPO = """
import sys
sys.path[:0] = ["examples/grpo"]
from tiny_model import make_model, make_tokenizer
tokenizer = make_tokenizer()
make_model(tokenizer, 0).save_pretrained(PLACE)
tokenizer.save_pretrained(PLACE)
"""


@pytest.mark.timeout(1200)
def test_the_example_of_the_manual_trains_with_trl(tmp_path: Path) -> None:
    [text] = [text for text in EXAMPLES if "GRPOTrainer(" in text and "Async" not in text]
    with server(tmp_path, "--network", "none", suite=DRAWERS) as serving:
        code = f"PLACE = {str(tmp_path / 'model')!r}\n{GRPO}\n{text}\nassert trainer.state.global_step == 2\n"
        for old, new in {
            "http://127.0.0.1:8400": serving.url,
            '"Qwen/Qwen3-0.6B"': "PLACE",
            '["add-1", "django-1"]': '["R0", "G1"]',
            "max_new_tokens=512": "max_new_tokens=2",
            "GRPOConfig(": f"GRPOConfig({str(tmp_path / 'trl')!r}, max_steps=2, {ON_A_CPU}, ",
        }.items():
            assert old in code
            code = code.replace(old, new)
        run_python("-c", code)
