"""A task whose environment compares the runs of one agent."""

import asyncio

import verifiers.v1 as vf


class ContestTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ContestTaskset(vf.Taskset[ContestTask, vf.TasksetConfig]):
    def load(self):
        for letter in "ab":
            yield ContestTask(vf.TaskData(name=letter, prompt=f"Write {letter} more than once."))


class ContestEnvConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    prize: float = 0.5


class ContestEnv(vf.Env[ContestEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await asyncio.gather(*(agents.writer.run(task) for _ in range(3)))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        longest = max(len(trace.last_reply) for trace in episode.traces)
        for trace in episode.traces:
            trace.record_reward("wins", float(len(trace.last_reply) == longest), self.config.prize)
            trace.record_metric("rivals", len(episode.traces) - 1)


__all__ = ["ContestEnv", "ContestTaskset"]
