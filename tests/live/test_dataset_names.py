"""Datasets by name, with the real `datasets` package: from a hub, and without a network from its cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.dataset_hub import HubDataset, serve_dataset
from tests.forked_command import run_forked
from tests.swebench_rows import Benchmark

from holdwater.core.errors import BadInput
from holdwater.suite.swebench import dataset
from holdwater.suite.swebench.dataset import DatasetSource, read_dataset
from holdwater.suite.swebench.rows import make_absolute, parse_options

NAME = "acme/Calc-bench"


class HubScene(NamedTuple):
    """A dataset that was on a hub, and the environment in which only its cache is left."""

    place: Path
    commit: str
    env: Mapping[str, str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubScene]:
    """A run of a row has filled the cache; then the hub is gone."""
    place = tmp_path_factory.mktemp("hub")
    benchmark = Benchmark(place / "benchmark")
    rows = [benchmark.add(name) for name in ("one", "two")]
    hub = HubDataset(NAME)
    hub.commit("v1", {"test": rows[:1], "dev": rows[:1]})
    commit = hub.commit("v2", {"test": rows, "dev": rows[:1]})
    env = {"HF_HOME": str(place / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    spec = f"swebench:{NAME}@v2?repos={benchmark.repos}"
    with serve_dataset(hub) as url:
        words = ("run", spec, "--agent", "gold", "--out", "run", "--limit", "1", "--json", "--quiet")
        done = run_forked(*words, cwd=place, env={**os.environ, **env, "HF_ENDPOINT": url}, seconds=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"passed": 1}
    yield HubScene(place, commit, {**env, "HF_HUB_OFFLINE": "1"})


@pytest.fixture
def cached(scene: HubScene, monkeypatch: pytest.MonkeyPatch) -> HubScene:
    for name, value in scene.env.items():
        monkeypatch.setenv(name, value)
    return scene


def load(**source: str) -> None:
    list(read_dataset(DatasetSource(**{"name": NAME, **source}), ["instance_id"]))


def test_rows_of_a_revision_come_one_at_a_time_from_the_cache(cached: HubScene) -> None:
    source = DatasetSource(name=NAME, revision=cached.commit)

    rows = read_dataset(source, ["instance_id", "no_such_column"])

    assert json.loads(next(rows)) == {"instance_id": "one"}
    rows.close()  # type: ignore[attr-defined]


def test_another_revision_than_the_cached_one_is_refused(cached: HubScene) -> None:
    with pytest.raises(
        BadInput, match=rf"`{NAME}@v1 \(test\)`: the rows are of another revision: `{cached.commit}`"
    ):
        load(revision="v1")


def test_an_unknown_split_names_the_known_ones(cached: HubScene) -> None:
    with pytest.raises(BadInput, match=r'Unknown split "train". Should be one of \[\'test\', \'dev\'\]'):
        load(split="train")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages = [sys.executable, "-S", *dataset.READER[1:]]
    monkeypatch.setattr(dataset, "READER", without_packages)

    with pytest.raises(BadInput, match="the package `datasets` is not installed") as caught:
        load()

    assert caught.value.hint == "`pip install 'holdwater[swebench]'`; a file needs no package"


def test_a_spec_has_name_revision_split_and_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = "swebench:acme/Calc-bench@refs/convert/x?split=dev&subset=small"

    expected = DatasetSource(name=NAME, revision="refs/convert/x", split="dev", subset="small")
    assert parse_options(spec).dataset == expected
    assert parse_options("swt:acme/Calc-bench").dataset == DatasetSource(name=NAME)
    assert make_absolute(spec) == spec
    assert parse_options("swebench:acme/rows.jsonl").dataset is None
    (tmp_path / "acme" / "Calc-bench").mkdir(parents=True)
    assert parse_options("swebench:acme/Calc-bench").dataset is None


def test_a_split_is_no_option_of_a_file() -> None:
    with pytest.raises(BadInput, match="`split` is an option of a dataset by name"):
        parse_options("swebench:rows.jsonl?split=dev")
