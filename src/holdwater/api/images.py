"""Image builds as typed calls: plan, build, resume, audit and clean. Calls for runs are in `runs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import msgspec

from ..core.config import RunConfig
from ..core.image import ImagesAudit, ImagesPlan
from ..core.summary import RunSummary
from ..image.docker.daemon import DaemonLeftover
from ..ledger.directory import RunDirectory
from ..ledger.images import BuildReport, report_build, write_manifest
from ..ledger.reader import LedgerReader
from ..run.builds.build import PreparedBuild, make_build_run, prepare_build
from ..run.builds.build import audit_build as audit_build
from ..run.builds.build import plan_build as plan_build
from ..run.builds.build_daemon import clean_daemon
from ..run.builds.build_run import make_stub_agent
from ..run.execute import RunSetup, create_run
from ..run.setup.config import read_environment
from ..run.setup.options import ImageBuildOptions as ImageBuildOptions
from ..run.setup.options import parse_build_settings
from .run_hooks import RunHooks, conduct_with_hooks, make_setup, wait


def build_images(
    recipe: str | Path, *, out: str | Path | None = None, **options: Unpack[ImageBuildOptions]
) -> BuildReport:
    """Make the missing images of a recipe; the build's `images.json` lists the result of each image."""
    summary = wait(start_build(prepare_images(recipe, out, **options), {}))
    with LedgerReader(summary.directory) as reader:
        return report_build(reader, summary)


def plan_images(recipe: str | Path, **options: Unpack[ImageBuildOptions]) -> ImagesPlan:
    """Return what `build_images` would do, without doing it."""
    return wait(plan_build(prepare_images(recipe, None, **options)))


def audit_images(path: str | Path, *, deep: bool = False, trust: bool = False) -> ImagesAudit:
    """Prove that every image of a build is in its registry, as it was recorded."""
    return wait(audit_build(Path(path), deep=deep, trust=trust))


async def clean_images(*, do: bool) -> list[DaemonLeftover]:
    """List the data that builds keep on the docker daemon; with `do`, remove it."""
    return await clean_daemon(read_environment(), do=do)


def prepare_images(
    recipe: str | Path, out: str | Path | None, **options: Unpack[ImageBuildOptions]
) -> PreparedBuild:
    return prepare_build(Path(recipe), Path(out) if out is not None else None, parse_build_settings(options))


async def start_build(prepared: PreparedBuild, around: RunHooks) -> RunSummary:
    """Create the directory of a prepared build and conduct the build."""
    directory = create_run(prepared.path, prepared.config)
    return await _conduct_build(directory, _make_setup(directory, prepared.config, around), around)


async def resume_build(
    directory: RunDirectory, config: RunConfig, retry: tuple[str, ...], around: RunHooks
) -> RunSummary:
    """Conduct a build that already has a directory."""
    given = _make_setup(directory, config, around)
    given = msgspec.structs.replace(given, resumed=True, retry=retry, config=config)
    return await _conduct_build(directory, given, around)


def _make_setup(directory: RunDirectory, config: RunConfig, around: RunHooks) -> RunSetup:
    assert config.recipe is not None
    works = make_build_run(config, directory.logs)
    given = make_setup(works.suite, make_stub_agent(config.recipe.chosen_engine), around)
    return msgspec.structs.replace(given, build_run=works)


async def _conduct_build(directory: RunDirectory, given: RunSetup, around: RunHooks) -> RunSummary:
    summary = await conduct_with_hooks(directory, given, around)
    with LedgerReader(directory) as reader:
        write_manifest(reader)
    return summary
