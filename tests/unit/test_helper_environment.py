"""Every process that holdwater starts gets an environment that somebody chose for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import holdwater
from holdwater.core.environment import build_environment, build_python_environment
from holdwater.dialect import list_key_variables
from holdwater.run.setup.keys import KEY_ENDINGS

SOURCE = Path(holdwater.__file__).parent
STARTS = {"create_subprocess_exec", "create_subprocess_shell", "Popen", "run", "check_output", "check_call"}
# Builds of layers need the operator's settings of proxies and indexes: `env -u` takes the keys out there.
# The `datasets` package needs those of its cache, proxy and token: again without the keys.
# Tool servers are started by a program inside the sandbox, whose environment is that of the sandbox.
INHERITS = {"image/layer/program.py", "suite/swebench/dataset.py", "suite/verifiers/tool_servers.py"}


def starts(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS:
            owner = ast.unparse(node.func.value)
            if (
                owner in ("subprocess", "asyncio", "asyncio.subprocess")
                and owner + node.func.attr != "asynciorun"
            ):
                yield node


def test_no_helper_process_inherits_an_environment() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "suite/demo/tasks" not in str(path)]
    found = {path: list(starts(path)) for path in files}

    assert sum(map(len, found.values())) >= 10
    inheriting = {
        str(path.relative_to(SOURCE))
        for path, calls in found.items()
        for call in calls
        if "env" not in {keyword.arg for keyword in call.keywords}
    }
    assert inheriting == INHERITS


def test_the_clean_environment_has_nothing_of_this_process(monkeypatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_FOR_TESTS", "x")
    monkeypatch.setenv("OPENAI_API_KEY", "x")

    assert set(build_environment(A="b")) == {"PATH", "LANG", "A"}
    assert set(build_python_environment()) == {"PATH", "LANG", "PYTHONPATH"}
    assert "OPENAI_API_KEY" in list_key_variables()
    assert all(name.endswith(KEY_ENDINGS) for name in list_key_variables())
