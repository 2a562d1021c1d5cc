"""What an order brings reaches its attempts in a real worker: held calls, limits, a model that changes."""

import json

from tests.worker_harness import working

from holdwater.core.config import ServingConfig
from holdwater.core.failures import make_interrupt_failure
from holdwater.core.records import LimitOverrides
from holdwater.core.serving_protocol import CallAnswer, ModelChoice, ModelSource, SteerRequest
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.rollout.worker_protocol import (
    AnswerHeldCall,
    AttemptProgress,
    CallHeld,
    CallReleased,
    CancelAttempt,
    FetchHeldCall,
    HeldCallContent,
    OrderTerms,
    SteerWorker,
)
from holdwater.testing.scripted_model import ScriptedReply, serve_script

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
HELD = OrderTerms(model=ModelChoice(source=ModelSource.TRAINER), followed=True)


async def test_a_trainer_answers_steers_and_goes_away(tmp_path):
    (tmp_path / "suite.py").write_text(SUITE)
    async with (
        serve_script(lambda request: ScriptedReply(text=f"by {request['model']}")) as url,
        working(tmp_path / "run", tmp_path / "suite.py", serving=ServingConfig()) as (worker, _),
    ):
        held = worker.start("a", HELD)
        limited = worker.start("b", OrderTerms(model=HELD.model, limits=LimitOverrides(requests=1)))
        cancelled = worker.start("c", HELD)
        await worker.until(CallHeld, lambda m: m.attempt == cancelled)
        worker.send(CancelAttempt(attempt=cancelled, failure=make_interrupt_failure("its client is gone")))
        for attempt, calls in ((held, 3), (limited, 1)):
            for call in range(1, calls + 1):
                await worker.until(CallHeld, lambda m, a=attempt, c=call: (m.attempt, m.call) == (a, c))
                worker.send(FetchHeldCall(attempt=attempt, call=call))
                asked = await worker.until(
                    HeldCallContent, lambda m, a=attempt, c=call: (m.attempt, m.call) == (a, c)
                )
                text = json.loads(asked.append[-1])["content"]
                answer = CallAnswer(call=str(call), text=f"to {text}", version=f"v{call}")
                worker.send(AnswerHeldCall(attempt=attempt, call=call, answer=answer))
        verdict = (await worker.done(held)).verdict
        assert json.loads(verdict.answer) == ["to a 0", "to a 1", "to a 2"]
        assert [p.turns for p in worker.all(AttemptProgress) if p.attempt == held] == [1, 2, 3]
        assert (await worker.done(limited)).verdict.failure.kind == "requests"
        assert (await worker.done(cancelled)).verdict.failure.where == "interrupted"
        assert [m.attempt for m in worker.all(CallReleased)] == [cancelled]
        worker.send(FetchHeldCall(attempt=held, call=3))
        await worker.until(HeldCallContent, lambda m: m.attempt == held and not m.dialect)
        worker.send(SteerWorker(to=SteerRequest(url=url, name="m7", version="7")))
        plain = worker.start("d")
        assert json.loads((await worker.done(plain)).verdict.answer) == ["by m7"] * 3
        directory = RunDirectory(tmp_path / "run")
        assert [e.version for e in read_exchanges(directory, held)] == ["v1", "v2", "v3"]
        assert [e.version for e in read_exchanges(directory, plain)] == ["7"] * 3
