"""Builds the images of an `images.toml`: prepare, plan, build, resume and audit.

`run/execute.py` conducts a build like any other run.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Agent
from ...core.config import RunConfig
from ...core.errors import BadInput, RunStopped
from ...core.image import (
    EngineKind,
    FailedForecast,
    ForcedPhase,
    ImageForecast,
    ImageOutcome,
    ImageRecipe,
    ImagesAudit,
    ImagesPlan,
)
from ...core.records import Limits
from ...image.registry.lookup import PushChecks, check_image
from ...ledger.audit import audit_run as audit_ledger
from ...ledger.directory import RunDirectory
from ...ledger.images import read_images, require_recipe
from ...ledger.reader import LedgerReader
from ...version import __version__
from ..execute import RunSetup
from ..setup.config import check_config, default_directory, read_environment
from ..setup.options import load_recipe
from ..setup.resumption import check_trust
from .build_run import ImageBuildRun, make_image_suite
from .engine_choice import can_assemble

OVERRIDES = ("engine", "concurrency", "disk", "cache", "keep", "force")  # options that replace the recipe's


def prepare_build(recipe: Path, out: Path | None, said: dict[str, Any]) -> RunSetup:
    """Check everything that can be checked without a registry; make nothing."""
    found = load_recipe(recipe)
    changes = {name: said.pop(name) for name in OVERRIDES if said.get(name) is not None}
    found = msgspec.structs.replace(found, **changes)
    if found.chosen_engine is EngineKind.REGISTRY and not can_assemble(found):
        raise BadInput("`--engine registry` cannot carry out the recipe's `before` and `after`")
    if found.force is ForcedPhase.BASES and found.base_repository is None:
        raise BadInput("`--force bases` requires `target.bases` in the recipe")
    if len(found.platforms) > 1 and found.chosen_engine is EngineKind.DOCKER:
        raise BadInput("`--engine docker` makes one platform at a time, and the recipe names several")
    suite = make_image_suite(found)
    if suite.check is not None:
        suite.check()
    timeout = said.pop("timeout", None)
    config = RunConfig(
        id=secrets.token_hex(8),
        suite=found.path,
        agent=str(found.chosen_engine),
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
    return make_setup(out or default_directory(f"images-{Path(found.path).stem}"), config)


def make_setup(path: Path, config: RunConfig) -> RunSetup:
    """Return the setup of a build. It has no agent: the engine's name takes the place of the agent's."""
    build_run = make_build_run(config, RunDirectory(path).logs)
    agent = Agent(name=config.agent, act=lambda: None, uses_model=False)
    return RunSetup(
        path=path,
        config=config,
        suite=build_run.suite,
        agent=agent,
        environment=read_environment(),
        build_run=build_run,
    )


def make_build_run(config: RunConfig, logs: Path) -> ImageBuildRun:
    assert config.recipe is not None
    return ImageBuildRun(config.recipe, config, read_environment(), logs)


async def plan_build(prepared: RunSetup, tell: Callable[[str], None] = lambda text: None) -> ImagesPlan:
    """Return the plan of a build. Image tags depend on the agent's layer, so this builds it once."""
    recipe = prepared.config.recipe
    assert recipe is not None
    with tempfile.TemporaryDirectory(prefix="holdwater-plan-") as logs:
        async with make_build_run(prepared.config, Path(logs)) as works:
            tell("preparing the agent's layer")
            await works.set_up(prepared.config.id)
            rows: list[ImageForecast | FailedForecast] = []  # bound: the images of the recipe, small records
            async for row in works.foresee_images(PushChecks(works.registries, works.note)):
                rows.append(row)
                tell(f"looked at {len(rows)} images")
            free = works.daemon.allowance() if works.daemon else 0
            return _make_plan(recipe, works, rows, free)


async def audit_build(
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    *,
    deep: bool = False,
    trust: bool = False,
) -> ImagesAudit:
    """Check that the ledger is complete and each of its images is in the registry, complete and unaltered.

    By default only the sizes of layers are checked; `deep` reads their contents.
    """
    ledger = audit_ledger(path)
    problems = list(ledger.problems)
    checked = failed = 0
    check_trust(RunDirectory.open(path), trust=trust)
    with LedgerReader(path) as reader, tempfile.TemporaryDirectory(prefix="holdwater-audit-") as logs:
        require_recipe(reader)
        async with make_build_run(reader.config, Path(logs)) as works:
            for row in read_images(reader):
                if row.made is None:
                    failed += 1
                    problems.append(f"`{row.name}` was not made: {row.failure}")
                    continue
                checked += 1
                tell(f"checked {checked} images")
                if wrong := await check_image(works.registries, row.made, deep=deep):
                    problems.append(f"`{row.name}`: {wrong}")
    return ImagesAudit(
        planned=ledger.planned,
        settled=ledger.settled,
        checked=checked,
        failed=failed,
        problems=tuple(problems),
        ok=ledger.ok and not problems and ledger.planned == ledger.settled,
    )


def _make_plan(
    recipe: ImageRecipe, works: ImageBuildRun, rows: list[ImageForecast | FailedForecast], free: int
) -> ImagesPlan:
    known = [row for row in rows if isinstance(row, ImageForecast)]
    make = [row for row in known if row.how is ImageOutcome.MADE]
    layers = works.blueprint.layers
    failed = [row for row in rows if isinstance(row, FailedForecast)]
    disk = max((row.disk for row in make), default=0)
    return ImagesPlan(
        recipe=recipe.path,
        revision=recipe.revision,
        engine=str(recipe.chosen_engine),
        why=_explain_engine(recipe),
        layers=tuple(layer.digest for layer in layers),
        layer_bytes=sum(layer.size for layer in layers),
        total=len(rows),
        make=len(make),
        present=len(known) - len(make),
        impossible=sum(not row.again for row in failed),
        unknown=sum(row.again for row in failed),
        make_bases=len({row.prepared for row in make if row.prepares}),
        upload=sum(row.upload for row in make),
        download=sum(row.download for row in make),
        disk=disk,
        disk_free=free,
        exit_status=RunStopped.exit_status if disk > free else int(bool(failed)),
        images=rows,
    )


def _explain_engine(recipe: ImageRecipe) -> str:
    if recipe.engine is recipe.chosen_engine:
        return "set by the recipe"
    if recipe.base_repository is not None and not recipe.steps.after:
        return "`before` needs it; the agent is added in the registry"
    if recipe.steps:
        return "the recipe has `before` or `after`, which no registry can carry out"
    return "nothing has to be run, so nothing is pulled"
