"""A task whose environment plays the user."""

import verifiers.v1 as vf


class QuizTask(vf.Task[vf.TaskData]):
    pass


class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        yield QuizTask(vf.TaskData(prompt="Ask me."))


class QuizEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()


__all__ = ["QuizEnv", "QuizTaskset"]
