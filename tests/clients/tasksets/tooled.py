"""A task with a tool server, which reads the task and shares its state with the rewards."""

import verifiers.v1 as vf


class NoteState(vf.State):
    entries: tuple[str, ...] = ()


class NoteData(vf.TaskData):
    owner: str


class NoteConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class NoteToolset(vf.Toolset[vf.ToolsetConfig, NoteState]):
    TOOL_PREFIX = "ledger"

    async def setup_task(self, task: NoteData) -> None:
        self.owner = task.owner

    @vf.tool
    async def note(self, text: str) -> str:
        """Note a text."""
        self.state.entries += (f"{self.owner}: {text}",)
        return f"noted {text}"


class NoteTask(vf.Task[NoteData, NoteState, NoteConfig]):
    @classmethod
    def toolsets(cls, config: NoteConfig) -> list[vf.Toolset]:
        return [NoteToolset(config.tools)]

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.entries += ("before",)

    @vf.reward
    async def noted(self, trace: vf.Trace) -> float:
        assert [message.content for message in trace.tool_messages] == ["noted milk"]
        assert [tool.name for tool in trace.tools] == ["ledger_note"]
        return float(trace.state.entries == ("before", "ann: milk"))


class NoteTasksetConfig(vf.TasksetConfig):
    task: NoteConfig = NoteConfig()


class NoteTaskset(vf.Taskset[NoteTask, NoteTasksetConfig]):
    def load(self):
        yield NoteTask(NoteData(prompt="Note milk.", owner="ann"), self.config.task)


__all__ = ["NoteTaskset"]

if __name__ == "__main__":
    NoteToolset.run()
