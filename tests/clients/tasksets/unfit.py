"""Tasksets and tasks that cannot run here: each is refused by name."""

import verifiers.v1 as vf


class PlainTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def good(self, trace: vf.Trace) -> float:
        return 1.0


class UnfitTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    """One task for each field that no sandbox can implement, and one that is fine."""

    def load(self):
        for fields in (
            {"prompt": None},
            {"network_allow": ["pypi.org"]},
            {"network_block": ["example.com"]},
            {"resources": vf.TaskResources(gpu="A100")},
            {"skills": [{"runtime": "/skills"}]},
            {"workdir": "here"},
            {},
        ):
            yield PlainTask(vf.TaskData(**{"prompt": "Go.", **fields}))


class ToolConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """It never starts: its module does not run it."""

    @vf.tool
    async def find(self, name: str) -> str:
        """Find a name."""
        return name


class ToolTask(vf.Task[vf.TaskData, vf.State, ToolConfig]):
    @classmethod
    def toolsets(cls, config):
        return [LookupToolset(config.tools)]


class ToolTasksetConfig(vf.TasksetConfig):
    task: ToolConfig = ToolConfig()


class ToolTaskset(vf.Taskset[ToolTask, ToolTasksetConfig]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="Find it."), self.config.task)


class RewritingTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def shout(self, request: vf.Request):
        return None


class RewritingTaskset(vf.Taskset[RewritingTask, vf.TasksetConfig]):
    def load(self):
        yield RewritingTask(vf.TaskData(prompt="Go."))


class BrokenTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self):
        yield PlainTask(vf.TaskData(prompt="Go."))
        raise LookupError("no more rows")


__all__ = ["BrokenTaskset", "RewritingTaskset", "ToolTaskset", "UnfitTaskset"]
