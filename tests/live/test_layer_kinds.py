"""From what a recipe says of the agent to a layer: directories and images, taken as they are."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from holdwater.core.errors import BadInput
from holdwater.core.image import AgentSource
from holdwater.core.records import GiB
from holdwater.image.layer.agent_layer import prepare_agent
from holdwater.image.layer.cache import LayerCache


async def test_a_directory_is_packed_once_for_its_content(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "run").write_text("one")
    source = AgentSource(directory=str(agent), prefix="/srv/a")
    async with LayerCache(tmp_path / "cache", GiB) as cache:
        first = await prepare_agent(source, cache, tmp_path / "log")
        written = Path(first.layer.path).stat().st_ino
        again = await prepare_agent(source, cache, tmp_path / "log")
        (agent / "run").write_text("two")
        changed = await prepare_agent(source, cache, tmp_path / "log")

        assert again == first
        assert Path(again.layer.path).stat().st_ino == written
        assert changed.layer.diff_id != first.layer.diff_id
        with tarfile.open(changed.layer.path) as tar:
            assert tar.getnames() == ["srv/a", "srv/a/run"]


async def test_a_path_of_an_image_becomes_a_layer_with_its_origin(tmp_path: Path) -> None:
    async def fetch(source: AgentSource, into: Path) -> str:
        (into / "tool").write_text(source.image or "")
        return "sha256:abc"

    async with LayerCache(tmp_path / "cache", GiB) as cache:
        packaged = await prepare_agent(AgentSource(image="a/b:1:/opt/tool"), cache, tmp_path / "log", fetch)

        with tarfile.open(packaged.layer.path) as tar:
            content = tar.extractfile("opt/agent/tool")
            assert content is not None and content.read() == b"a/b:1:/opt/tool"
        assert packaged.origin == "sha256:abc"
        assert not list((tmp_path / "cache" / "scratch").iterdir())


@pytest.mark.parametrize(
    "source",
    [
        AgentSource(),
        AgentSource(directory="/not/there"),
        AgentSource(source="/not/there"),
        AgentSource(package="x", prefix="/opt/my agent"),
        AgentSource(directory="/etc", prefix="opt"),
    ],
    ids=["nothing", "no directory", "no project", "spaces", "relative"],
)
async def test_what_cannot_be_a_layer_is_refused(source: AgentSource, tmp_path: Path) -> None:
    async with LayerCache(tmp_path, GiB) as cache:
        with pytest.raises(BadInput):
            await prepare_agent(source, cache, tmp_path / "log")
