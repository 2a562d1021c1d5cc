"""SWE-bench in containers: the same verdicts as in processes, each graded in a container of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.container_runs import IMAGE, Ground
from tests.swebench_rows import CODE, MENDED, Benchmark, cheats, diff

pytestmark = pytest.mark.skipif(
    find_spec("swebench") is None and os.environ.get("CI") != "true",
    reason="`swebench` is not installed: `scripts/setup dev`",
)
BREAKING = MENDED.replace("a + b", "a - b")
CHEATS = ("prints-at-import", "leaves-at-import", "deselects")


def test_gold_resolves_and_nothing_else_does(ground: Ground, tmp_path: Path) -> None:
    benchmark = Benchmark(tmp_path / "benchmark", python="python3")
    gold = benchmark.add("gold")["patch"]
    repo = benchmark.repos / "gold"
    faked = cheats(repo)
    patches = {
        "gold": gold,
        "empty": "",
        "breaking": diff(repo, {"calc.py": BREAKING}),
        "unrelated": diff(repo, {"calc.py": CODE + "\n# a comment\n"}),
        **{name: faked[name] for name in CHEATS},
    }
    for name in patches:
        if name != "gold":
            benchmark.add(name)
    predictions = benchmark.predictions(patches)
    scene = ground.scene(tmp_path)
    words = ("--suite", benchmark.spec(image=IMAGE), "--out", str(scene.out), "--json", "--concurrency", "4")

    graded = scene.start("grade", str(predictions), *words)

    assert graded.wait(200) == 0, graded
    report = graded.document()
    assert (report["resolved_ids"], report["empty_patch_ids"]) == (["gold"], ["empty"])
    assert report["infra_failure_instances"] == 0 and report["submitted_instances"] == len(patches)
    scene.assert_whole(len(patches))
    ground.assert_clean()
    scene.close()
