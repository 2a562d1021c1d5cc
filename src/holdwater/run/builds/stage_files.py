"""Build a stage of a Dockerfile on the docker daemon, and take the agent's files out of it.

The build leaves no image on the daemon, only build cache, which a janitor keeps within the recipe's `cache`.
`image/layer/agent_layer.py` packs the files.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from ...core.image import ImageRecipe, Note, StageSource
from ...docker.build import BuildFailed, BuildRequest, find_docker, read_daemon_time
from ...docker.client import DockerClient, DockerError
from ...image.docker.dockerfile import DockerfileContext, measure_files, read_stage
from ...image.docker.failure_causes import build_error, daemon_error
from ...image.docker.janitor import Janitor
from ...image.docker.ownership import BuildTrace
from ...image.layer.program import run_in_thread
from ..setup.config import ProcessEnvironment
from .build_daemon import find_state_directory


class StageBuild:
    """The build of one stage."""

    def __init__(
        self, stage: StageSource, recipe: ImageRecipe, environment: ProcessEnvironment, note: Note
    ) -> None:
        self._stage = stage
        self._recipe = recipe
        self._environment = environment
        self._note = note

    async def build_files(self, into: Path, log: Path) -> None:
        """Write the content of the stage's path into the directory `into`. `log` receives the output."""
        stage = self._stage
        doing = f"the agent's stage of `{stage.dockerfile}` cannot be built"
        text = Path(stage.dockerfile).read_text("utf-8")
        directory = Path(stage.context)
        context = await run_in_thread(lambda check: read_stage(directory, text, stage.target, stage.path))
        try:
            await self._build(context, into, log)
        except BuildFailed as error:
            raise build_error(doing, error.message, timed_out=error.timed_out) from error
        except DockerError as error:
            raise daemon_error(f"{doing}: {error.message}", error.hint) from error

    async def _build(self, context: DockerfileContext, into: Path, log: Path) -> None:
        environment, recipe = self._environment, self._recipe
        request = BuildRequest(
            dockerfile=context.dockerfile,
            tag="",
            context=context.directory,
            arguments=self._stage.arguments,
            platform=str(recipe.platforms[0]),
            output=str(into),
            network=recipe.network,
        )
        state, run = find_state_directory(environment), f"agent-{os.getpid()}"
        async with (
            DockerClient(environment.docker_host) as client,
            Janitor(client, state, run, recipe.daemon_cache, self._note) as janitor,
        ):
            docker = await find_docker(client.host, janitor.work / "docker", environment.path)
            begun = await read_daemon_time(client)
            async with janitor.track_build(lambda now: replace(context.trace, begun=begun)):
                await docker.build(request, log)
            # The record of the last copy is known by its size, which is only known now.
            trace = BuildTrace(begun=begun, sizes=(await run_in_thread(lambda check: measure_files(into)),))
            async with janitor.track_build(lambda now: trace):
                pass
