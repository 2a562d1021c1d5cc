"""An environment of verifiers 0.1: two turns, and rewards that read the completion."""

import verifiers as vf
from datasets import Dataset


class SumEnv(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure?"}]

    @vf.stop
    async def asked_twice(self, state) -> bool:
        return len(state["trajectory"]) >= 2


def right(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"] == answer)


def turns(state, **kwargs) -> float:
    return float(len(state["trajectory"]))


def longest(completions, **kwargs) -> list[float]:
    sizes = [len(completion[-1]["content"]) for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def load_environment(count: int = 2, grouped: bool = False):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(count)]
    funcs = [right, turns, longest] if grouped else [right, turns]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, 0.0, 0.5][: len(funcs)])
    return SumEnv(eval_dataset=Dataset.from_list(rows), rubric=rubric)
