"""A suite for training: the agent guesses the number in a box, and is told `higher` or `lower`.

A group of attempts is scored together: those that needed more guesses than the best get half of their score.

holdwater serve examples/guessing.py:suite --agent examples/guessing.py:guess
"""

import holdwater as hw

SECRETS = {"red": 2, "green": 5, "blue": 7}
LARGEST = 8
MOST = 4  # guesses


def instances():
    for box, secret in SECRETS.items():
        yield hw.Instance(
            id=box, instruction=f"box {box}: a number from 1 to {LARGEST}", data={"secret": secret}
        )


async def guess(instance, sandbox, model):
    """Asks its model until the number is found; how many guesses that took, or None."""
    secret = instance.data["secret"]
    messages = [{"role": "user", "content": instance.instruction}]
    for count in range(1, MOST + 1):
        reply = (await model.chat(messages))["choices"][0]["message"]
        number = int(reply["content"])
        if number == secret:
            return count
        hint = f"{instance.instruction}: {'higher' if number < secret else 'lower'} than {number}"
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": hint}]
    return None


def grade(instance, sandbox, answer):
    return 1.0 / answer if answer else 0.0


def group(instance, members):
    """Sees every member while it is alive: its answer, grade, sandbox, model and exchanges."""
    best = min((member.answer for member in members if member.answer), default=None)
    return [member.grade.score / (1 if member.answer == best else 2) for member in members]


suite = hw.Suite(name="guessing", instances=instances, grade=grade, group=group)
