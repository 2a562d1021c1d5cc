"""A suite for a very small model: find the drawer that belongs to a key, then say which digit lies in it.

holdwater serve examples/grpo/drawers.py:suite --agent examples/grpo/drawers.py:search --network none
"""

import holdwater as hw

KEYS, DRAWERS, DIGITS = "RGBK", "abcd", "0123"
# The agent leaves its drawer, the digit that it found and the digit that it said.
CHECK = """
[ -f answer ] || exit 0
{ read -r drawer; read -r found; read -r digit; } < answer
[ "$drawer" = "$RIGHT" ] && echo right
[ "$found" != "?" ] && [ "$digit" = "$found" ] && echo read
true
"""


def instances():
    for key, right in zip(KEYS, DRAWERS, strict=True):
        for shift in range(len(DIGITS)):
            digits = {d: DIGITS[(place + shift) % len(DIGITS)] for place, d in enumerate(DRAWERS)}
            yield hw.Instance(
                id=f"{key}{shift}",
                instruction=key,
                files={f"drawer/{name}": digit for name, digit in digits.items()},
                data={"right": right},
            )


def read_text(reply):
    return reply["choices"][0]["message"]["content"] or ""


async def search(instance, sandbox, model):
    """Two turns: the drawer to open, and the digit that a command in the sandbox has found in it."""
    messages = [{"role": "user", "content": instance.instruction}]
    drawer = read_text(await model.chat(messages))
    look = await sandbox.run('cat "drawer/$DRAWER"', env={"DRAWER": drawer[:1] or "none"})
    found = look.output if look.ok and look.output in [*DIGITS] else "?"
    messages += [
        {"role": "assistant", "content": drawer},
        {"role": "tool", "tool_call_id": "1", "content": found},
    ]
    digit = read_text(await model.chat(messages))
    await sandbox.write("answer", f"{drawer[:1]}\n{found}\n{digit[:1]}\n")
    return digit


async def grade(instance, sandbox, answer):
    """Half of the score for the right drawer, half for the digit that was found."""
    check = await sandbox.run(CHECK, env={"RIGHT": instance.data["right"]})
    done = check.output.split()
    return hw.Grade(passed=len(done) == 2, score=len(done) / 2)


suite = hw.Suite(name="drawers", instances=instances, grade=grade)
