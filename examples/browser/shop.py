"""A browser as an environment: headless Chromium in the sandbox, and a screenshot of each step for the model.

The agent is the program `browse.py` in the sandbox. The pages of the shop come from a server in the sandbox,
which has no other network than the gateway. `scripted_shopper.py` is a model that needs no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import holdwater as hw

HERE = Path(__file__).parent
PROGRAM = HERE / "browse.py"
BROWSER_MEMORY = 256 * 1024 * 1024  # of a sandbox: Chromium and the program
WARES = ("kettle", "lamp", "clock", "chair", "bowl")
COLOURS = ("blue", "green", "red", "white")
PAGE = """<!doctype html><meta charset="utf-8"><title>Shop</title>
<style>body {{ font: 18px sans-serif; margin: 2em }} a, button {{ margin: 1em; font-size: 1em }}
.ware {{ width: 300px; height: 200px; background: {colour} }}</style>{body}"""
ORDER = """<h1>Your order</h1><div class=ware></div><form><input id=name placeholder="Your name">
<button>Send</button></form><p id=done></p>
<script>document.forms[0].onsubmit = event => {{
  event.preventDefault();
  const name = document.getElementById("name").value;
  const sum = [...(name + "{ware}")].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 1000003, 7);
  document.getElementById("done").textContent = name ? "Order number: " + sum : "Please give your name";
}}</script>"""


def instances() -> Iterator[hw.Instance]:
    for number in range(100):
        ware, colour = WARES[number % 5], COLOURS[number % 4]
        yield hw.Instance(
            id=f"order-{number}",
            instruction=f"Order the {colour} {ware} for Customer{number}. Answer with the order number.",
            files=build_pages(),
            data={"expected": count_order(f"Customer{number}", f"{colour} {ware}")},
            limits=hw.LimitOverrides(memory=BROWSER_MEMORY),
        )


def build_pages() -> dict[str, str]:
    """Return the shop: a page of wares, one page for each ware, one order form for each ware and colour."""
    links = "".join(f'<a href="{ware}.html">{ware}s</a>' for ware in WARES)
    pages = {"index.html": PAGE.format(colour="white", body=f"<h1>Shop</h1>{links}")}
    for ware in WARES:
        links = "".join(f'<a href="{colour}-{ware}.html">{colour} {ware}</a>' for colour in COLOURS)
        pages[f"{ware}.html"] = PAGE.format(colour="white", body=f"<h1>All {ware}s</h1>{links}")
        for colour in COLOURS:
            body = ORDER.format(ware=f"{colour} {ware}")
            pages[f"{colour}-{ware}.html"] = PAGE.format(colour=colour, body=body)
    return {f"site/{name}": text for name, text in pages.items()}


def count_order(customer: str, ware: str) -> str:
    """Return the order number that the form shows."""
    number = 7
    for letter in customer + ware:
        number = (number * 31 + ord(letter)) % 1000003
    return str(number)


def grade(instance: hw.Instance, sandbox: hw.GradingSandbox, answer: str | None) -> bool:
    return (answer or "").strip() == instance.data["expected"]


async def shop(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
    """Run the browser and its loop in the sandbox."""
    program, task = f"{sandbox.private}/browse.py", f"{sandbox.private}/task.txt"
    await sandbox.write(program, PROGRAM.read_text())
    await sandbox.write(task, instance.instruction)
    env = {"MODEL": model.name, "MODEL_URL": model.sandbox_url, "MODEL_KEY": model.key}
    result = await sandbox.run(["python3", program, task], env=env)
    if not result.ok:
        raise hw.AgentFailed(f"the browser's program ended with {result.exit_code}: {result.stderr[-1000:]}")
    return result.stdout


suite = hw.Suite(name="shop", instances=instances, grade=grade, size=100)
