"""A taskset with the options that the manual's commands have."""

from typing import Literal

import verifiers.v1 as vf


class PageTaskConfig(vf.TaskConfig):
    similarity_power: int = 4


class PageTask(vf.Task[vf.TaskData, vf.State, PageTaskConfig]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply)) ** self.config.similarity_power


class PageConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    task: PageTaskConfig = PageTaskConfig()


class PageTaskset(vf.Taskset[PageTask, PageConfig]):
    def load(self):
        yield PageTask(vf.TaskData(prompt="Say something."), self.config.task)


__all__ = ["PageTaskset"]
