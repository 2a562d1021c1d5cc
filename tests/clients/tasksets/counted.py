"""Tasks that note each scoring in a file of this machine; a scoring waits while the file `gate` exists."""

import asyncio
from pathlib import Path

import verifiers.v1 as vf


class CountedConfig(vf.TasksetConfig):
    place: str  # the directory of the notes and the gate
    count: int = 3
    open: int = 1  # so many tasks do not wait at the gate


class CountedData(vf.TaskData):
    place: str
    waits: bool


class CountedTask(vf.Task[CountedData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        note(self, "begin")
        while self.data.waits and Path(self.data.place, "gate").exists():
            await asyncio.sleep(0.05)
        note(self, "end")
        return float(len(trace.last_reply) > 0)


class CountedTaskset(vf.Taskset[CountedTask, CountedConfig]):
    def load(self):
        for number in range(self.config.count):
            waits = number >= self.config.open
            prompt = f"Write {number} more than once."
            yield CountedTask(
                CountedData(name=f"t{number}", prompt=prompt, place=self.config.place, waits=waits)
            )


class CountedEnvConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()


class CountedEnv(vf.Env[CountedEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await asyncio.gather(*(agents.writer.run(task) for _ in range(2)))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        note(task, "compare")
        for trace in episode.traces:
            trace.record_reward("rivals", float(len(episode.traces) - 1), 1.0)


def note(task: vf.Task, what: str) -> None:
    with Path(task.data.place, "notes").open("a") as notes:
        notes.write(f"{task.data.name} {what}\n")


__all__ = ["CountedEnv", "CountedTaskset"]
