"""Prints the rows of a dataset as JSON Lines: a program of its own, which `dataset.py` starts.

Standard input has the request. After a failure the last line of standard error is the reason, as JSON.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

INSTALL = "`pip install 'holdwater[swebench]'`; a file needs no package"


def main() -> None:
    request = json.load(sys.stdin)
    try:
        datasets, hub = import_module("datasets"), import_module("huggingface_hub")
    except ImportError as error:
        fail(f"the package `{error.name or 'datasets'}` is not installed", INSTALL)
    datasets.disable_progress_bars()
    cache = datasets.config.HF_DATASETS_CACHE
    try:
        name, subset = request["name"], request["subset"]
        rows = datasets.load_dataset(name, subset, split=request["split"], revision=request["revision"])
    except Exception as error:  # boundary: the package raises errors of many kinds  # noqa: BLE001
        fail(f"{type(error).__name__}: {error}", describe_cache(cache))
    if problem := find_other_revision(rows, request, hub):
        fail(problem, f"it is in the cache `{cache}`, and the hub was not reached")
    for row in select(rows, request["columns"]):
        sys.stdout.write(json.dumps(row, default=str) + "\n")


def select(rows: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    known = [name for name in columns if name in rows.column_names]
    yield from rows.select_columns(known)


def find_other_revision(rows: Any, request: dict[str, Any], hub: Any) -> str:
    """Explain that the rows are of another revision: without a network the package takes whichever it has."""
    if request["revision"] is None or not rows.cache_files:
        return ""
    found = Path(rows.cache_files[0]["filename"]).parent.name
    wanted = find_commit(request["name"], request["revision"], hub)
    return "" if found == wanted else f"the rows are of another revision: `{found}`"


def find_commit(name: str, revision: str, hub: Any) -> str:
    """Return the commit that a revision names, on the hub or in the cache; the revision itself if unknown."""
    try:
        return str(hub.HfApi().dataset_info(name, revision=revision).sha)
    except Exception:  # boundary: without a network the package raises errors of many kinds  # noqa: BLE001
        cache = Path(hub.constants.HF_HUB_CACHE)
        refs = cache / f"datasets--{name.replace('/', '--')}" / "refs" / revision
        return refs.read_text().strip() if refs.is_file() else revision


def describe_cache(cache: object) -> str:
    return (
        f"its cache is `{cache}` (`HF_HOME` names another one); a file needs neither: `swebench:rows.parquet`"
    )


def fail(message: str, hint: str) -> None:
    problem = {"message": " ".join(message.split())[:1000], "hint": hint}
    sys.stderr.write(f"\n{json.dumps(problem)}\n")
    sys.exit(3)


if __name__ == "__main__":
    main()
