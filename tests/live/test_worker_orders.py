"""What an order brings reaches its attempts in a real worker: held calls, limits, a model that changes."""

import json

from tests.worker_scene import working

from holdwater.core.config import Serving
from holdwater.core.failures import interrupted
from holdwater.core.records import Ask
from holdwater.core.serving import Answer, ModelChoice, Source, Steer
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.rollout.wire import Answered, Asked, Cancel, Held, Offer, Progress, Steered, Take, Unheld
from holdwater.testing.scripted import Reply, serve

SUITE = """
import holdwater as hw

async def solve(instance, sandbox, model):
    said = []
    while len(said) < 3:
        told = [{"role": "user", "content": f"{instance.id} {n}"} for n in range(len(said) + 1)]
        said.append((await model.chat(told))["choices"][0]["message"]["content"])
    return said

suite = hw.Suite(name="s", instances=lambda: [], grade=lambda instance, sandbox, answer: True)
"""
HELD = Offer(model=ModelChoice(source=Source.TRAINER), followed=True)


async def test_a_trainer_answers_steers_and_goes_away(tmp_path):
    (tmp_path / "suite.py").write_text(SUITE)
    async with (
        serve(lambda request: Reply(text=f"by {request['model']}")) as url,
        working(tmp_path / "run", tmp_path / "suite.py", serving=Serving()) as (worker, _),
    ):
        held = worker.start("a", HELD)
        limited = worker.start("b", Offer(model=HELD.model, limits=Ask(requests=1)))
        cancelled = worker.start("c", HELD)
        await worker.until(Held, lambda m: m.attempt == cancelled)
        worker.send(Cancel(attempt=cancelled, failure=interrupted("its client is gone")))
        for attempt, calls in ((held, 3), (limited, 1)):
            for call in range(1, calls + 1):
                await worker.until(Held, lambda m, a=attempt, c=call: (m.attempt, m.call) == (a, c))
                worker.send(Take(attempt=attempt, call=call))
                asked = await worker.until(Asked, lambda m, a=attempt, c=call: (m.attempt, m.call) == (a, c))
                text = json.loads(asked.append[-1])["content"]
                answer = Answer(call=str(call), text=f"to {text}", version=f"v{call}")
                worker.send(Answered(attempt=attempt, call=call, answer=answer))
        verdict = (await worker.done(held)).verdict
        assert json.loads(verdict.answer) == ["to a 0", "to a 1", "to a 2"]
        assert [p.turns for p in worker.all(Progress) if p.attempt == held] == [1, 2, 3]
        assert (await worker.done(limited)).verdict.failure.kind == "requests"
        assert (await worker.done(cancelled)).verdict.failure.where == "interrupted"
        assert [m.attempt for m in worker.all(Unheld)] == [cancelled]
        worker.send(Take(attempt=held, call=3))
        await worker.until(Asked, lambda m: m.attempt == held and not m.dialect)
        worker.send(Steered(to=Steer(url=url, name="m7", version="7")))
        plain = worker.start("d")
        assert json.loads((await worker.done(plain)).verdict.answer) == ["by m7"] * 3
        directory = RunDirectory(tmp_path / "run")
        assert [e.version for e in read_exchanges(directory, held)] == ["v1", "v2", "v3"]
        assert [e.version for e in read_exchanges(directory, plain)] == ["7"] * 3
