"""A training loop in a page: groups of rollouts, advantages, and a policy that gets better.

python examples/rl_loop.py             the trainer answers its agents' model calls itself
python examples/rl_loop.py --steer     the policy is an endpoint; the server is steered to each new version

It starts a server of its own (`holdwater serve`) for the suite in `guessing.py`, and needs no model.
"""

import asyncio
import math
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from aiohttp import web
from guessing import LARGEST, SECRETS

from holdwater.client import AsyncClient, CallAnswer

STEPS, GROUP, RATE = 10, 8, 0.8
HERE = Path(__file__).parent


class Policy:
    """For each thing that it can be asked, how likely each answer is: a model of a few numbers."""

    def __init__(self):
        self.version = 0
        self.logits = defaultdict(lambda: [0.0] * LARGEST)

    def chances(self, asked):
        weights = [math.exp(logit) for logit in self.logits[asked]]
        return [weight / sum(weights) for weight in weights]

    def say(self, messages):
        return str(random.choices(range(1, LARGEST + 1), self.chances(messages[-1]["content"]))[0])

    def learn(self, rollout, advantage):
        """Policy gradient: what was said becomes more likely, as far as it was better than the others."""
        for node in rollout.trajectory:
            if node.sampled:  # the policy said it: the others are what it was asked
                asked = rollout.trajectory[node.parent].message["content"]
                for number, chance in enumerate(self.chances(asked), 1):
                    said = node.message["content"] == str(number)
                    self.logits[asked][number - 1] += RATE * advantage * (said - chance)

    async def answer(self, call):
        """The trainer's own way: each model call of an agent comes here. It may take as long as it likes."""
        return CallAnswer(call=call.id, text=self.say(call.messages), version=str(self.version))

    async def complete(self, request):
        """The same as an endpoint: Chat Completions over HTTP."""
        message = {"role": "assistant", "content": self.say((await request.json())["messages"])}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def train(client, policy, endpoint=None):
    print(f"{'step':>4} {'reward':>7}  versions")
    for step in range(STEPS):
        if endpoint is not None:  # running rollouts would change over too: each message knows its version
            await client.steer(endpoint, "toy", version=str(policy.version))
        answers = policy.answer if endpoint is None else None
        async with asyncio.TaskGroup() as tasks:
            groups = [tasks.create_task(client.run_group(box, GROUP, policy=answers)) for box in SECRETS]
        rollouts = []
        for group in (task.result().rollouts for task in groups):
            scored = [rollout for rollout in group if rollout.reward is not None]  # the others tell nothing
            mean = sum(rollout.reward for rollout in scored) / max(1, len(scored))
            rollouts += [(rollout, rollout.reward - mean) for rollout in scored]
        for rollout, advantage in rollouts:
            policy.learn(rollout, advantage)
        policy.version += 1
        reward = sum(rollout.reward for rollout, _ in rollouts) / max(1, len(rollouts))
        versions = {node.version for rollout, _ in rollouts for node in rollout.trajectory if node.sampled}
        print(f"{step:>4} {reward:>7.3f}  {' '.join(sorted(versions))}", flush=True)


async def main(steered):
    with tempfile.TemporaryDirectory() as place:
        listen = f"unix:{place}/s"
        suite, agent = f"{HERE}/guessing.py:suite", f"{HERE}/guessing.py:guess"
        words = ["serve", suite, "--agent", agent, "--listen", listen, "--out", f"{place}/run", "--quiet"]
        server = await asyncio.create_subprocess_exec(sys.executable, "-m", "holdwater", *words)
        policy = Policy()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", policy.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1" if steered else None
            async with AsyncClient(listen) as client:  # it waits until the server is there
                await train(client, policy, endpoint)
                await client.drain()
            await server.wait()
        finally:
            if server.returncode is None:
                server.terminate()
                await server.wait()
            await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main("--steer" in sys.argv[1:]))
