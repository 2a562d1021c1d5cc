"""Images as typed calls: plan, build, resume, audit and clean. The rest of the library is beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import msgspec

from ..core.config import RunConfig
from ..core.image import ImagesAudit, Plan
from ..core.summary import Summary
from ..image.docker.janitor import Left
from ..ledger.directory import RunDirectory
from ..ledger.images import BuildReport, report, write_manifest
from ..ledger.reader import Reader
from ..run.build import PreparedBuild, prepare_build, works_for
from ..run.build import audit_build as audit_build
from ..run.build import plan_build as plan_build
from ..run.config import environment
from ..run.daemon import clean_daemon
from ..run.execute import Conduct, create
from ..run.images import no_agent
from ..run.options import BuildOptions as BuildOptions
from ..run.options import build_settings
from .around import Around, conducted, given_to, wait


def build_images(
    recipe: str | Path, *, out: str | Path | None = None, **options: Unpack[BuildOptions]
) -> BuildReport:
    """Make what is missing of a recipe's images; what became of each is in the build's `images.json`."""
    summary = wait(start_build(prepare_images(recipe, out, **options), {}))
    with Reader(summary.directory) as reader:
        return report(reader, summary)


def plan_images(recipe: str | Path, **options: Unpack[BuildOptions]) -> Plan:
    """What `build_images` would do, without doing it."""
    return wait(plan_build(prepare_images(recipe, None, **options)))


def audit_images(path: str | Path, *, deep: bool = False, trust: bool = False) -> ImagesAudit:
    """Prove that every image of a build is in its registry as it was recorded."""
    return wait(audit_build(Path(path), deep=deep, trust=trust))


async def clean_images(*, do: bool) -> list[Left]:
    """What builds keep on the docker daemon, and with `do` removed now."""
    return await clean_daemon(environment(), do=do)


def prepare_images(
    recipe: str | Path, out: str | Path | None, **options: Unpack[BuildOptions]
) -> PreparedBuild:
    return prepare_build(Path(recipe), Path(out) if out is not None else None, build_settings(options))


async def start_build(prepared: PreparedBuild, around: Around) -> Summary:
    """Make the directory of a prepared build and conduct it."""
    directory = create(prepared.path, prepared.config)
    return await _build(directory, _given(directory, prepared.config, around), around)


async def go_on(
    directory: RunDirectory, config: RunConfig, retry: tuple[str, ...], around: Around
) -> Summary:
    """Resume a build."""
    given = _given(directory, config, around)
    given = msgspec.structs.replace(given, resumed=True, retry=retry, config=config)
    return await _build(directory, given, around)


def _given(directory: RunDirectory, config: RunConfig, around: Around) -> Conduct:
    assert config.recipe is not None
    works = works_for(config, directory.logs)
    given = given_to(works.suite, no_agent(config.recipe.chosen), around)
    return msgspec.structs.replace(given, works=works)


async def _build(directory: RunDirectory, given: Conduct, around: Around) -> Summary:
    summary = await conducted(directory, given, around)
    with Reader(directory) as reader:
        write_manifest(reader)
    return summary
