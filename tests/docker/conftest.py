"""One daemon and one registry for all tests here: a test's images have names of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import box_scene, docker_scene, ground_scene
from tests.docker_scene import MB, Daemon, Registry
from tests.ground_scene import Ground


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with docker_scene.registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with docker_scene.daemon(tmp_path_factory.mktemp("docker"), 800 * MB) as found:
        yield found


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground_scene.ground(tmp_path_factory.mktemp("ground")) as found:
        yield found


@pytest.fixture(scope="session")
def root() -> bytes:
    docker_scene.needed("ldd")
    return docker_scene.root()


@pytest.fixture(scope="session")
def netdaemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with networks, in which the image `box_scene.IMAGE` is."""
    with docker_scene.daemon(tmp_path_factory.mktemp("netdocker"), networks=box_scene.POOL) as found:
        box_scene.import_image(found)
        yield found
