"""Tasks with work in a sandbox: set-up, state, finalize, rewards that run commands, limits."""

import verifiers.v1 as vf


class WorkshopState(vf.State):
    drawn: tuple[str, ...] = ()


class WorkshopData(vf.TaskData):
    part: str


class WorkshopTask(vf.Task[WorkshopData, WorkshopState]):
    def runtime_env(self) -> dict[str, str]:
        return {"PART": self.data.part}

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("plans/part.txt", self.data.part.encode())
        made = await runtime.run(["sh", "-c", "cp plans/part.txt template && printenv PART && exit 3"], {})
        assert (made.exit_code, made.stdout.strip()) == (3, self.data.part), made
        trace.state.drawn += (self.data.part,)
        trace.info["drawn"] = 1
        self.secret = self.data.part[::-1]  # kept between the hooks, and seen by no agent

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["work"] = (await runtime.read("work")).decode()
        assert len(await runtime.read("work", max_bytes=100)) < 100

    @vf.reward
    async def fits(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        assert trace.state.drawn == (self.data.part,)
        compared = await runtime.run(["cmp", "work", "template"], {"LC_ALL": "C"})
        return float(compared.exit_code == 0 and self.secret == trace.info["work"][::-1])


class WorkshopConfig(vf.TasksetConfig):
    parts: tuple[str, ...] = ("gear", "lever")


class WorkshopTaskset(vf.Taskset[WorkshopTask, WorkshopConfig]):
    def load(self):
        for part in self.config.parts:
            yield WorkshopTask(
                WorkshopData(
                    id=part,
                    prompt=f"Make a {part}.",
                    system_prompt="You are in a workshop.",
                    part=part,
                    network_allow=[],
                    timeout=vf.TaskTimeout(setup=300, agent=200, scoring=100),
                    resources=vf.TaskResources(cpu=1, memory=0.25),
                )
            )


__all__ = ["WorkshopTaskset"]
