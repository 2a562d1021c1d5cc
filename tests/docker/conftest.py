"""One daemon and one registry for all tests here: a test's images have names of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import container_image, container_runs, docker_daemon
from tests.container_runs import Ground
from tests.docker_daemon import MB, Daemon, Registry


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with docker_daemon.registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with docker_daemon.daemon(tmp_path_factory.mktemp("docker"), 800 * MB) as found:
        yield found


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with container_runs.ground(tmp_path_factory.mktemp("ground")) as found:
        yield found


@pytest.fixture(scope="session")
def root() -> bytes:
    docker_daemon.needed("ldd")
    return docker_daemon.root()


@pytest.fixture(scope="session")
def netdaemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with networks, in which the image `box_scene.IMAGE` is."""
    with docker_daemon.daemon(tmp_path_factory.mktemp("netdocker"), networks=container_image.POOL) as found:
        container_image.import_image(found)
        yield found
