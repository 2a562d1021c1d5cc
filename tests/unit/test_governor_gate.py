"""The gate: leases in order, never more than there is, and an end to every wait."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.failures import make_interrupt_failure
from holdwater.core.records import FailureOrigin, MiB
from holdwater.governor.gate import HOPELESS_READINGS, LEAST_RESERVE, Gate, Lease
from holdwater.governor.resource_reading import ResourceBound


def gate_of(memory: int, used: int = 0) -> Gate:
    """A gate with so many MiB for leases; `used` are others' beside that."""
    gate = Gate()
    limit = memory * MiB + LEAST_RESERVE + used * MiB
    assert limit * 0.06 <= LEAST_RESERVE, "the reserve of these tests is the least there is"
    gate.memory.set_usage((ResourceBound("budget", limit, used * MiB, "here"),), {})
    return gate


def lease(memory: int, disk: int = 0) -> Lease:
    return Lease(memory * MiB, disk * MiB)


async def asked(gate: Gate, attempt: int, need: Lease) -> asyncio.Task[object]:
    task = asyncio.ensure_future(gate.take(attempt, need))
    await asyncio.sleep(0)
    return task


async def test_what_fits_is_granted_at_once_and_what_does_not_waits():
    gate = gate_of(100)
    assert await gate.take(1, lease(60)) is None

    second = await asked(gate, 2, lease(60))
    assert not second.done() and gate.waiting == (2,) and gate.binds == "memory"

    gate.give_back(1)
    assert await second is None and gate.waiting == () and gate.binds == ""


async def test_no_request_passes_a_large_one_at_the_head():
    gate = gate_of(100)
    await gate.take(1, lease(50))
    large, small = await asked(gate, 2, lease(90)), await asked(gate, 3, lease(10))

    assert not small.done(), "there is room for it, but not its turn"
    gate.give_back(1)
    assert await large is None and await small is None


async def test_a_request_beyond_the_limit_is_refused_at_once_with_both_figures():
    failure = await gate_of(100).take(1, lease(150))

    assert failure is not None and failure.where is FailureOrigin.BUDGET and not failure.again
    assert failure.message == "needs 150 MiB of memory; at most 100 MiB are available"


async def test_a_request_that_never_fits_beside_others_is_refused_after_a_while():
    gate = gate_of(100, used=60)
    waits = await asked(gate, 1, lease(120))
    for _ in range(HOPELESS_READINGS - 1):
        gate.on_measured()
    assert not waits.done()

    gate.on_measured()
    failure = await waits
    assert failure is not None and failure.message.endswith("at most 100 MiB are available")


async def test_what_attempts_use_beyond_their_leases_is_counted_and_neighbours_too():
    gate = gate_of(100)
    await gate.take(1, lease(20))
    bound = ResourceBound("budget", 100 * MiB + LEAST_RESERVE, 70 * MiB, "here")

    gate.memory.set_usage((bound,), {1: 50 * MiB})

    assert gate.memory.room == 30 * MiB  # 50 of the attempt's, 20 of others'
    assert gate.memory.leasable_total == 80 * MiB


async def test_the_tightest_of_several_bounds_counts():
    gate = gate_of(100)
    wide, tight = (
        ResourceBound(n, mib * MiB + LEAST_RESERVE, 0, "") for n, mib in (("machine", 90), ("pod", 30))
    )

    gate.memory.set_usage((wide, tight), {})

    assert gate.memory.room == 30 * MiB


async def test_a_lease_grows_before_waiting_requests_but_never_beyond_the_limit():
    gate = gate_of(100)
    await gate.take(1, lease(40))
    await asked(gate, 2, lease(80))

    assert gate.extend(1, 90 * MiB) and gate.memory.leases[1] == 90 * MiB
    assert not gate.extend(1, 101 * MiB) and gate.memory.leases[1] == 90 * MiB
    assert not gate.extend(7, MiB), "it has none"


async def test_no_request_is_admitted_until_the_last_reason_is_gone():
    gate = gate_of(100)
    gate.hold("disk")
    gate.hold("memory")
    waits = await asked(gate, 1, lease(10))

    gate.release("memory")
    assert not waits.done() and gate.binds == "disk"
    gate.release("disk")
    assert await waits is None


async def test_who_needs_nothing_waits_for_a_reason_and_for_nothing_else():
    gate = gate_of(0, used=10)
    gate.hold("disk")
    waits = await asked(gate, 1, lease(0))
    assert gate.waiting == (1,)

    gate.release("disk")
    assert await waits is None
    assert await gate.take(2, lease(0)) is None


async def test_a_guess_that_does_not_fit_takes_the_available_memory_when_alone():
    gate = gate_of(100, used=60)
    gate.memory.set_usage((ResourceBound("budget", 100 * MiB, 60 * MiB, "here"),), {})
    waits = await asked(gate, 1, Lease(500 * MiB, firm=False))
    for _ in range(HOPELESS_READINGS):
        assert not waits.done()
        gate.on_measured()

    assert await waits is None


async def test_disk_is_leased_like_memory():
    gate = gate_of(100)
    gate.disk.set_usage((ResourceBound("disk", 200 * MiB, 100 * MiB, ""),), {})
    await gate.take(1, lease(1, disk=60))

    waits = await asked(gate, 2, lease(1, disk=60))
    assert gate.binds == "disk"
    gate.give_back(1)
    assert await waits is None


async def test_one_that_waits_can_be_let_go_and_the_next_moves_up():
    gate = gate_of(100)
    await gate.take(1, lease(50))
    large, small = await asked(gate, 2, lease(90)), await asked(gate, 3, lease(10))

    assert gate.drop(2, make_interrupt_failure("a signal")) and not gate.drop(
        2, make_interrupt_failure("again")
    )

    failure = await large
    assert failure is not None and failure.where is FailureOrigin.INTERRUPTED
    assert await small is None


async def test_a_cancelled_wait_takes_nothing():
    gate = gate_of(100)
    await gate.take(1, lease(100))
    waits = await asked(gate, 2, lease(50))

    waits.cancel()
    await asyncio.wait({waits})
    gate.give_back(1)

    assert gate.memory.leases == {} and gate.waiting == ()


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), min_size=1, max_size=40))
def test_everyone_is_served_in_order_and_the_sum_never_exceeds_the_limit(steps):
    async def play() -> None:
        gate, tasks, begun, ended = gate_of(100), [], [], 0
        for attempt, (need, gives_back) in enumerate(steps):
            tasks.append(await asked(gate, attempt, lease(need)))
            if gives_back and gate.memory.leases:
                gate.give_back(min(gate.memory.leases))
                ended += 1
            await asyncio.sleep(0)
            assert sum(gate.memory.leases.values()) <= 100 * MiB
            begun = [a for a, task in enumerate(tasks) if task.done()]
            assert begun == list(range(len(begun))), "in order"
        while gate.memory.leases:
            gate.give_back(min(gate.memory.leases))
            await asyncio.sleep(0)
        assert all(task.done() and task.result() is None for task in tasks)

    asyncio.run(play())


async def test_disk_is_lent_only_without_a_queue_and_with_room():
    gate = gate_of(100)
    gate.disk.set_usage((ResourceBound("disk", 100 * MiB, 0, "here"),), {})
    assert gate.lend(-1, 60 * MiB) and not gate.lend(-2, 60 * MiB)

    waiting = await asked(gate, 1, lease(1, 60))
    assert not waiting.done() and not gate.lend(-2, 1), "what is there belongs to who waits"
    gate.give_back(-1)
    assert await waiting is None and gate.lend(-2, 30 * MiB)


async def test_what_has_become_use_of_the_disk_is_leased_no_more():
    gate = gate_of(100)
    gate.disk.set_usage((ResourceBound("disk", 100 * MiB, 0, "here"),), {})
    await gate.take(1, lease(1, 80))
    second = await asked(gate, 2, lease(1, 30))

    gate.disk.set_usage((ResourceBound("disk", 100 * MiB, 40 * MiB, "here"),), {})
    assert not second.done() and gate.disk.room < 0, "what it brought counts twice for a moment"
    gate.shrink(1, 60 * MiB)

    assert await second is None and gate.disk.leases == {1: 20 * MiB, 2: 30 * MiB}
    assert gate.find_disk_refusal(95 * MiB) is not None and gate.find_disk_refusal(90 * MiB) is None
