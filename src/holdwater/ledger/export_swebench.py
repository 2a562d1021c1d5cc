"""Predictions and report as SWE-bench's own tools read and write them."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from .chosen import first_samples, patch_of
from .omitted import Omitted
from .reader import Reader


def write_predictions(reader: Reader, out: BinaryIO) -> None:
    """A line for each instance that was settled."""
    name = reader.config.model or reader.config.agent
    for one in first_samples(reader, Omitted(reader)):
        patch = patch_of(reader, one.row.attempt)
        row = {"instance_id": one.outcome.instance, "model_name_or_path": name, "model_patch": patch or ""}
        out.write(msgspec.json.encode(row) + b"\n")


def report(reader: Reader) -> dict[str, Any]:
    """The report of a run."""
    names = ("submitted", "completed", "resolved", "unresolved", "empty_patch", "error", "infra_failure")
    ids: dict[str, list[str]] = {name: [] for name in names}
    for one in first_samples(reader, Omitted(reader)):
        patched = bool(patch_of(reader, one.row.attempt))
        ids["submitted"].append(one.outcome.instance)
        if not one.scored:
            ids["infra_failure"].append(one.outcome.instance)
        elif not patched:
            ids["empty_patch"].append(one.outcome.instance)
        else:
            ids["completed"].append(one.outcome.instance)
            ids["resolved" if one.outcome.kind == "passed" else "unresolved"].append(one.outcome.instance)
    counts = {f"{name}_instances": len(found) for name, found in ids.items()}
    total = reader.counts().planned
    return {
        "total_instances": total,
        **counts,
        **{f"{name}_ids": sorted(found) for name, found in ids.items()},
        "schema_version": 2,
    }
