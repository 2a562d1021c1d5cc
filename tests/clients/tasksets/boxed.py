"""A task of a container: its image, its directory, its user, and files outside of its directory."""

from typing import ClassVar

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER: ClassVar[bool] = True

    async def setup(self, runtime: vf.Runtime) -> None:
        made = await runtime.run(
            ["sh", "-c", "id -u && pwd && mkdir -p /opt/plans && chmod 755 /opt/plans"], {}
        )
        assert made.stdout.split() == ["0", "/srv/box"], made
        await runtime.write("/opt/plans/part", b"gear")

    @vf.reward
    async def fits(self, runtime: vf.Runtime) -> float:
        compared = await runtime.run(["cmp", "work", "/opt/plans/part"], {})
        owner = await runtime.run(["stat", "-c", "%U", "work"], {})
        beside = await runtime.read("/tmp/beside")
        return float((compared.exit_code, owner.stdout.strip(), beside) == (0, "nobody", b"left\n"))


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        data = vf.TaskData(prompt="Copy it.", image="debian:test", workdir="/srv/box", agent_user="nobody")
        yield BoxedTask(data)


__all__ = ["BoxedTaskset"]
