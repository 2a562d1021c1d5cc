"""A task whose environment plays the user: it asks for another word after each reply."""

import verifiers.v1 as vf


class QuizData(vf.TaskData):
    words: tuple[str, ...]


class QuizTask(vf.Task[QuizData]):
    @vf.reward(weight=0.5)
    async def patient(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == len(self.data.words) + trace.info["opened"])


class QuizConfig(vf.TasksetConfig):
    prompt: str | None = "Reverse: drawer"
    words: tuple[str, ...] = ("lever", "gear")


class QuizTaskset(vf.Taskset[QuizTask, QuizConfig]):
    def load(self):
        yield QuizTask(QuizData(prompt=self.config.prompt, words=self.config.words))


class QuizEnvConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class QuizEnv(vf.Env[QuizEnvConfig]):
    async def run(self, task, agents):
        right = 0
        async with agents.pupil.interaction(task) as quiz:
            quiz.trace.info["opened"] = int(task.data.prompt is not None)
            if task.data.prompt is not None:
                await quiz.turn()
            for word in task.data.words:
                reply = await quiz.turn(f"Reverse: {word}")
                if reply.terminated:
                    break
                right += reply.last_reply == word[::-1]
        quiz.trace.record_reward("right", right / len(task.data.words), 1.0)


__all__ = ["QuizEnv", "QuizTaskset"]
