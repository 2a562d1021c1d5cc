"""Tasks that judges score: one plugged by the configuration, one made in a reward."""

import verifiers.v1 as vf
from pydantic import Field


class TasteJudge(vf.Judge[float]):
    prompt = "Taste from 0 to 10: {response}"

    def parse(self, response: vf.JudgeResponse[float]) -> float:
        return float(response.text) / 10


class JudgedData(vf.TaskData):
    answer: str


class JudgedConfig(vf.TaskConfig):
    judges: vf.Judges = Field(default_factory=lambda: [vf.ReferenceJudgeConfig(weight=0.5)])


class JudgedTask(vf.Task[JudgedData, vf.State, JudgedConfig]):
    @vf.reward(weight=0.5)
    async def taste(self, trace: vf.Trace) -> float:
        judged = await TasteJudge().evaluate(trace=trace, response=trace.last_reply)
        return judged.parsed


class JudgedTasksetConfig(vf.TasksetConfig):
    task: JudgedConfig = JudgedConfig()


class JudgedTaskset(vf.Taskset[JudgedTask, JudgedTasksetConfig]):
    def load(self):
        yield JudgedTask(JudgedData(prompt="Name a colour.", answer="blue"), self.config.task)


__all__ = ["JudgedTaskset"]
