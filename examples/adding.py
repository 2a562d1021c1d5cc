"""A suite and two agents in Python: make `a.py` add.

holdwater run examples/adding.py:suite --agent examples/adding.py:solve
holdwater run examples/adding.py:suite --agent examples/adding.py:solve_in_a_thread
holdwater run examples/adding.py:suite --agent oracle
"""

import holdwater as hw

BROKEN = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"


def instances():  # pulled lazily: this could as well yield a million
    for n in range(1, 6):
        yield hw.Instance(
            id=f"add-{n}",
            instruction=f"Make `add` in a.py add. For example, add({n}, {n}) should be {2 * n}.",
            files={"a.py": BROKEN},
            solution=f"cat > a.py <<'EOF'\n{FIXED}EOF\n",
            data={"n": n},
        )


async def grade(instance, sandbox, answer):  # or a plain def; returns a bool, a float or an hw.Grade
    n = instance.data["n"]
    check = f"from a import add; assert add({n}, {n}) == {2 * n}"
    return (await sandbox.run(["python3", "-c", check])).ok


suite = hw.Suite(name="adding", instances=instances, grade=grade)


async def solve(instance, sandbox, model):
    """Runs on the worker's event loop. A real one would ask the model: `await model.chat([...])`."""
    text = (await sandbox.read("a.py")).decode()
    await sandbox.write("a.py", text.replace("a - b", "a + b"))
    return "replaced the minus"


def solve_in_a_thread(instance, sandbox, model):
    """The same as plain code: it gets a thread of its own, and a sandbox without `await`."""
    text = sandbox.read("a.py").decode()
    sandbox.write("a.py", text.replace("a - b", "a + b"))
    return "replaced the minus"
