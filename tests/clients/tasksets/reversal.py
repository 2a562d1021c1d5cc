"""Single-turn tasks that are judged by the trace alone: weights, metrics, a stop, and options."""

import verifiers.v1 as vf

WORDS = ("stressed", "level", "drawer")


class ReversalData(vf.TaskData):
    answer: str


class ReversalTaskConfig(vf.TaskConfig):
    brief: int = 12


class ReversalTask(vf.Task[ReversalData, vf.State, ReversalTaskConfig]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.metric
    async def spent(self, trace: vf.Trace) -> dict[str, float]:
        assert trace.usage is not None
        return {"prompt_tokens": float(trace.usage.prompt_tokens), "calls": float(len(trace.calls))}

    @vf.reward(weight=0.75)
    async def exact(self, task: ReversalData, trace: vf.Trace) -> float:
        roles = [message.role for message in trace.messages]
        assert roles in (["user", "assistant"], ["system", "user", "assistant"]), roles
        assert trace.assistant_messages[-1].content == trace.last_reply
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= self.config.brief)


class ReversalConfig(vf.TasksetConfig):
    words: tuple[str, ...] = WORDS
    task: ReversalTaskConfig = ReversalTaskConfig()


class ReversalTaskset(vf.Taskset[ReversalTask, ReversalConfig]):
    def load(self):
        print("taskset: a print of its own")
        for word in self.config.words:
            data = ReversalData(name=word, prompt=f"Reverse: {word}", answer=word[::-1])
            yield ReversalTask(data, self.config.task)


__all__ = ["ReversalTaskset"]
