"""The file system that the daemon really writes to, also where it is mounted for the daemon alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import docker_daemon
from tests.docker_daemon import MB

from holdwater.core.errors import RunStopped
from holdwater.docker.client import DockerClient
from holdwater.image.docker.daemon import find_daemon_disk, preflight


async def test_the_daemons_own_disk_is_measured_through_its_own_root(tmp_path: Path) -> None:
    with docker_daemon.daemon(tmp_path / "docker", 64 * MB, apart=True) as daemon:
        async with DockerClient(daemon.host) as client:
            disk = await find_daemon_disk(client)

            assert 40 * MB < disk.free <= disk.total < 64 * MB < daemon.free()
            preflight(disk.free, disk)
            with pytest.raises(RunStopped) as raised:
                preflight(1000 * 1024 * 1024, disk)
            assert raised.value.exit_status == 4
            assert "1,000.0 MiB are needed" in raised.value.message
            assert f"{disk.free / 1024 / 1024:,.1f} MiB are free" in raised.value.message

            with pytest.raises(RunStopped, match=f"cannot be seen from here: `{daemon.data}`"):
                await find_daemon_disk(client, proc=tmp_path)
