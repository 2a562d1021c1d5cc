"""Specs of tasksets, and tasks as instances: no package is needed for either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdwater.core.errors import BadInput
from holdwater.core.records import GiB, Network
from holdwater.plugin import find_module
from holdwater.suite.loader import load, make_absolute
from holdwater.suite.verifiers.tasks import TaskDescription, make_instance, name_task, parse_spec, read_task


def test_a_spec_has_options_of_the_taskset_and_of_the_environment() -> None:
    spec = parse_spec("vf:my.env:Taskset?split=test&task.power=4&rows=[1,2]&env=best-of-n&env.n=3&pass=0.5")

    assert (spec.name, spec.cls, spec.path) == ("my.env", "Taskset", None)
    assert spec.options == {"split": "test", "task": {"power": 4}, "rows": [1, 2]}
    assert (spec.env, spec.env_options, spec.passing) == ("best-of-n", {"n": 3}, 0.5)


def test_the_order_of_an_environments_options_does_not_count() -> None:
    assert parse_spec("vf:m?env.n=3&env=e") == parse_spec("vf:m?env=e&env.n=3")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("vf:", "missing module: `vf:`"),
        ("vf:m?pass=much", "option `pass` must be a number: `much`"),
        ("vf:m?x=1&x=2", "option given twice: `x`"),
        ("vf:m?env.n=3", "options of an environment need its name"),
    ],
)
def test_an_invalid_spec_is_refused(spec: str, problem: str) -> None:
    with pytest.raises(BadInput, match=problem.replace("(", r"\(")):
        parse_spec(spec)


def test_paths_become_absolute_and_modules_stay(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert make_absolute("vf:./a.py:T?x=./b") == f"vf:{tmp_path}/a.py:T?x=./b"
    assert make_absolute("vf:a.b:T") == "vf:a.b:T"


def test_a_suite_is_loaded_without_the_package() -> None:
    suite = load("vf:nosuch?env=nosuch")

    assert (suite.name, suite.fresh) == ("nosuch", False)
    assert suite.group is not None
    assert load("vf:nosuch").group is None


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"idx": 3}, "3"),
        ({"idx": 3, "name": "sum"}, "3-sum"),
        ({"idx": 3, "id": "django-1", "name": "sum"}, "3-django-1"),
        ({"name": "a\nb"}, "a b"),
        ({}, "task"),
    ],
)
def test_the_id_of_an_instance_follows_from_the_data(data: dict[str, Any], name: str) -> None:
    assert name_task(data) == name


def test_an_instance_has_the_limits_and_the_sandbox_of_its_task() -> None:
    data = {
        "idx": 0,
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image_url"}]}],
        "system_prompt": "Be brief.",
        "image": "debian:12",
        "workdir": "/app",
        "agent_user": "dev",
        "network_allow": [],
        "timeout": {"setup": 10, "agent": 20, "finalize": 5, "scoring": 30},
        "resources": {"cpu": 2, "memory": 1.5, "disk": 4},
    }

    instance = make_instance(TaskDescription(data=data, type="T", key="k", hash="h"))

    assert instance.instruction == "Be brief.\n\nLook."
    start, limits = instance.start, instance.limits
    assert (start.image, start.workdir, start.user, start.network) == (
        "debian:12",
        "/app",
        "dev",
        Network.GATEWAY,
    )
    assert not start.processes
    assert (limits.setup, limits.acting, limits.grading) == (10, 20, 35)
    assert (limits.cpus, limits.memory, limits.disk) == (2, int(1.5 * GiB), 4 * GiB)
    assert read_task(instance).key == "k"


def test_a_task_without_demands_takes_those_of_the_run() -> None:
    instance = make_instance(TaskDescription(data={"idx": 0, "prompt": "Go.", "network_allow": ["*"]}))

    assert instance.start.processes
    assert instance.start.network is None
    assert (instance.limits.grading, instance.limits.memory, instance.refused) == (None, None, "")


def test_a_package_is_found_by_its_directory_or_the_one_around_it(tmp_path: Path) -> None:
    for place in ("vf_flat_package", "vf-outer-package/vf_outer_package"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "__init__.py").write_text("__all__ = []\n")

    found = [find_module(str(tmp_path / name)).__name__ for name in ("vf_flat_package", "vf-outer-package")]

    assert found == ["vf_flat_package", "vf_outer_package"]
    with pytest.raises(BadInput, match="not a package"):
        find_module(str(tmp_path))
