"""Image builds as typed calls: plan, build, audit and clean. `runs.py` starts and resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from ..core.image import ImagesAudit, ImagesPlan
from ..image.docker.daemon import DaemonLeftover
from ..ledger.images import BuildReport, report_build
from ..ledger.reader import LedgerReader
from ..run.builds.build import audit_build as audit_build
from ..run.builds.build import plan_build as plan_build
from ..run.builds.build import prepare_build
from ..run.builds.build_daemon import clean_daemon
from ..run.execute import RunSetup
from ..run.setup.config import read_environment
from ..run.setup.options import ImageBuildOptions as ImageBuildOptions
from ..run.setup.options import parse_build_settings
from .process import wait
from .runs import start


def build_images(
    recipe: str | Path, *, out: str | Path | None = None, **options: Unpack[ImageBuildOptions]
) -> BuildReport:
    """Make the missing images of a recipe; the build's `images.json` lists the result of each image."""
    summary = wait(start(prepare_images(recipe, out, **options)))
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
) -> RunSetup:
    """Check everything that can be checked without a registry, and make nothing."""
    return prepare_build(Path(recipe), Path(out) if out is not None else None, parse_build_settings(options))
