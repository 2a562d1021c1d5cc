"""Where several threads read, types are made known to msgspec at import: met by two at once, it crashes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdwater

ROOT = Path(holdwater.__file__).parent
READ_BY_THREADS = [
    path
    for room in ("conversation", "export", "ledger", "suite", "view")
    for path in (ROOT / room).glob("*.py")
]


@pytest.mark.parametrize("path", READ_BY_THREADS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_decoders_are_made_at_import(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = [node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)]
    calls = [node for node in inside if isinstance(node, ast.Call)]
    late = [call for call in calls if ast.unparse(call.func).endswith(".Decoder") or by_type(call)]
    assert [ast.unparse(call) for call in late] == []


def by_type(call: ast.Call) -> bool:
    """Whether it decodes to a record; a `dict[...]` or `list[...]` has nothing that is made known."""
    if ast.unparse(call.func) not in ("msgspec.json.decode", "msgspec.msgpack.decode", "msgspec.convert"):
        return False
    kinds = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "type")]
    return any(not isinstance(kind, ast.Subscript) for kind in kinds)
