"""From an `images.toml` to its end: prepare, plan, build, resume and audit images.

The run itself is conducted in `execute.py`, as any other.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..core.config import RunConfig
from ..core.errors import BadInput
from ..core.image import EngineKind, Foreseen, How, ImagesAudit, Plan, Recipe, Unforeseen
from ..core.records import Limits
from ..image.recipe import read
from ..image.registry.check import check
from ..ledger.audit import audit as audit_ledger
from ..ledger.directory import RunDirectory
from ..ledger.images import images, recipe_of
from ..ledger.reader import Reader
from ..version import __version__
from .config import check as check_config
from .config import default_directory, environment
from .images import ImageWorks, suite_of
from .trust import check_trust


class PreparedBuild(msgspec.Struct, frozen=True):
    """A build that could be started: the recipe has been checked, nothing has been made."""

    path: Path
    config: RunConfig


def prepare_build(recipe: Path, out: Path | None, said: dict[str, Any]) -> PreparedBuild:
    """Check everything that can be checked without a registry, and make nothing."""
    found = read(recipe)
    changes = {
        name: said.pop(name) for name in ("engine", "concurrency", "disk") if said.get(name) is not None
    }
    found = msgspec.structs.replace(found, **changes)
    if found.steps and found.chosen is EngineKind.REGISTRY:
        raise BadInput("`--engine registry` cannot carry out the recipe's `before` and `after`")
    if len(found.platforms) > 1 and found.chosen is EngineKind.DOCKER:
        raise BadInput("`--engine docker` makes one platform at a time, and the recipe names several")
    suite = suite_of(found)
    if suite.check is not None:
        suite.check()
    timeout = said.pop("timeout", None)
    config = RunConfig(
        id=secrets.token_hex(8),
        suite=found.path,
        agent=str(found.chosen),
        created=time.time(),
        version=__version__,
        workers=0,
        concurrency=found.concurrency,
        limits=Limits(acting=timeout) if timeout is not None else Limits(),
        disk=found.disk,
        recipe=found,
        **{name: value for name, value in said.items() if value is not None},
    )
    check_config(config)
    return PreparedBuild(path=out or default_directory(f"images-{Path(found.path).stem}"), config=config)


def works_for(config: RunConfig, logs: Path) -> ImageWorks:
    assert config.recipe is not None
    return ImageWorks(config.recipe, config, environment(), logs)


async def plan_build(prepared: PreparedBuild, tell: Callable[[str], None] = lambda text: None) -> Plan:
    """What a build would do. The agent's layer is built for it, once: tags follow from its content."""
    recipe = prepared.config.recipe
    assert recipe is not None
    with tempfile.TemporaryDirectory(prefix="holdwater-plan-") as logs:
        async with works_for(prepared.config, Path(logs)) as works:
            tell("preparing the agent's layer")
            await works.set_up(prepared.config.id)
            rows: list[Foreseen | Unforeseen] = []  # bound: the images of the recipe, small records
            async for row in works.foreseen():
                rows.append(row)
                tell(f"looked at {len(rows)} images")
            free = works.daemon.disk().free if works.daemon else 0
            return _plan(recipe, works, rows, free)


async def audit_build(
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    *,
    deep: bool = False,
    trust: bool = False,
) -> ImagesAudit:
    """Whether the ledger is whole, and each image it names is in the registry, whole and unaltered.

    Layers are asked for their size; `deep` reads them all.
    """
    ledger = audit_ledger(path)
    problems = list(ledger.problems)
    checked = failed = 0
    check_trust(RunDirectory.open(path), trust=trust)
    with Reader(path) as reader, tempfile.TemporaryDirectory(prefix="holdwater-audit-") as logs:
        recipe_of(reader)
        async with works_for(reader.config, Path(logs)) as works:
            for row in images(reader):
                if row.made is None:
                    failed += 1
                    problems.append(f"`{row.name}` was not made: {row.failure}")
                    continue
                checked += 1
                tell(f"checked {checked} images")
                if wrong := await check(works.registries, row.made, deep=deep):
                    problems.append(f"`{row.name}`: {wrong}")
    return ImagesAudit(
        planned=ledger.planned,
        settled=ledger.settled,
        checked=checked,
        failed=failed,
        problems=tuple(problems),
        ok=ledger.ok and not problems and ledger.planned == ledger.settled,
    )


def _plan(recipe: Recipe, works: ImageWorks, rows: list[Foreseen | Unforeseen], free: int) -> Plan:
    known = [row for row in rows if isinstance(row, Foreseen)]
    make = [row for row in known if row.how is How.MADE]
    layers = works.blueprint.layers
    return Plan(
        recipe=recipe.path,
        engine=str(recipe.chosen),
        why=_why(recipe),
        layers=tuple(layer.digest for layer in layers),
        layer_bytes=sum(layer.size for layer in layers),
        total=len(rows),
        make=len(make),
        present=len(known) - len(make),
        unknown=len(rows) - len(known),
        upload=sum(row.upload for row in make),
        download=sum(row.download for row in make),
        disk=max((row.disk for row in make), default=0),
        disk_free=free,
        images=rows,
    )


def _why(recipe: Recipe) -> str:
    if recipe.engine is recipe.chosen:
        return "as the recipe says"
    if recipe.steps:
        return "the recipe has `before` or `after`, which no registry can carry out"
    return "nothing has to be run, so nothing is pulled"
