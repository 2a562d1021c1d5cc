"""Admitted bytes stay within their bound, in the order of arrival, and nobody waits for ever."""

import asyncio

from holdwater.gateway.body import ByteAdmission


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_does_not_fit_waits_and_the_first_comes_first():
    admission = ByteAdmission(100)
    order = []

    async def call(name, size):
        admitted = await admission.take(size)
        order.append(name)
        return admitted

    first = await call("first", 70)
    async with asyncio.TaskGroup() as group:
        large = group.create_task(call("large", 75))
        await settled()
        small = group.create_task(call("small", 25))
        await settled()
        assert order == ["first"], "the small one does not overtake"
        first.release()
        await settled()
        assert order == ["first", "large", "small"]
        assert admission.used == 100
    large.result().release()
    small.result().release()
    assert admission.used == 0


async def test_a_body_larger_than_the_bound_leaves_a_part_to_others():
    admission = ByteAdmission(100)
    other = await admission.take(26)
    async with asyncio.TaskGroup() as group:
        huge = group.create_task(admission.take(5000))
        await settled()
        assert not huge.done()
        other.release()
    assert admission.used == 75
    small = await admission.take(25)
    small.release()
    huge.result().release()


async def test_the_bodies_of_one_attempt_leave_a_part_to_others():
    """Given an attempt whose bodies never end."""
    whole = ByteAdmission(100)
    greedy, neighbour = ByteAdmission(whole.most_each, whole), ByteAdmission(whole.most_each, whole)
    endless = [asyncio.create_task(greedy.take(20)) for _ in range(50)]
    grown = await neighbour.take(1)
    await settled()
    assert sum(task.done() for task in endless) == 3

    await asyncio.wait_for(grown.grow(25), 10)

    admitted = [task.result() for task in endless if task.done()]
    for task in endless:
        task.cancel()
    await asyncio.wait(endless)
    for one in (grown, *admitted):
        one.release()
    assert (whole.used, greedy.used, neighbour.used) == (0, 0, 0)


async def test_two_bodies_that_grow_do_not_wait_for_each_other():
    admission = ByteAdmission(100)
    one, two = await admission.take(50), await admission.take(50)
    await one.grow(500)
    async with asyncio.TaskGroup() as group:
        growing = group.create_task(two.grow(60))
        await settled()
        assert not growing.done(), "one at a time exceeds the bound"
        one.release()
    assert admission.used == 60
    two.release()
    assert admission.used == 0


async def test_one_that_gives_up_waiting_leaves_its_place_to_the_next():
    admission = ByteAdmission(100)
    first = await admission.take(60)
    async with asyncio.TaskGroup() as group:
        impatient = group.create_task(admission.take(75))
        await settled()
        patient = group.create_task(admission.take(40))
        await settled()
        impatient.cancel()
    assert patient.result() is not None
    assert admission.used == 100
    # Given up in the very moment in which its turn has come.
    async with asyncio.TaskGroup() as group:
        late = group.create_task(admission.take(50))
        await settled()
        first.release()
        late.cancel()
    patient.result().release()
    assert admission.used == 0
