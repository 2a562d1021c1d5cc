"""Which build-cache records are taken for ours. The descriptions are those of a daemon of release 20.10."""

from __future__ import annotations

import msgspec

from holdwater.docker.build import CacheRecord
from holdwater.image.docker.ownership import (
    BuildTrace,
    find_own_records,
    find_unfinished,
    merge_traces,
    parse_commands,
)

TRACE = BuildTrace(
    begun=100.0,
    ended=200.0,
    whole=True,
    commands=parse_commands(
        ["RUN echo ours > /x && \\\n  cat /x", "ENV A=b", 'RUN --mount=type=tmpfs,target=/t ["ls", "/"]']
    ),
    sizes=(456672,),
    sources=(76, 198965),
)


def record(id: str, description: str, *parents: str, created: float = 150.0, **told: object) -> CacheRecord:
    return CacheRecord(id=id, description=description, parents=parents, created=created, **told)  # type: ignore[arg-type]


def source(id: str, what: str, size: int, **told: object) -> CacheRecord:
    return record(id, f"local source for {what}", kind="source.local", size=size, **told)


def ids(*records: CacheRecord, traces: tuple[BuildTrace, ...] = (TRACE,)) -> list[str]:
    return [one.id for one in find_own_records(records, traces)]


BASE = (record("b1", "from local "), record("b2", "from local ", "b1"))
RUN = record("run", "mount / from exec /bin/sh -c echo ours > /x &&   cat /x", "b2")
EXEC = record("exec", "mount / from exec ls /", "run")
ADD = record("add", "fileop target", "exec", size=456672)


def test_what_a_build_of_ours_made_goes_children_first() -> None:
    assert ids(*BASE, RUN, EXEC, ADD) == ["add", "exec", "run", "b2", "b1"]


def test_what_was_there_before_us_or_came_later_stays() -> None:
    before = record("early", RUN.description, created=99.9)
    after = record("late", RUN.description, created=200.1)
    assert ids(before, after) == []


def test_records_of_others_and_their_parents_stay() -> None:
    theirs = record("theirs", "mount / from exec /bin/sh -c echo ours > /x && cat /x; false", "b2")
    copied = record("copied", "fileop target", "b2", size=10)
    assert ids(*BASE, RUN, theirs) == ["run"]
    assert ids(*BASE, RUN, copied) == ["run"]
    assert ids(source("s", "dockerfile", 77), source("t", "context", 1000)) == []


def test_records_built_from_ours_are_ours() -> None:
    copied = record("copied", "fileop target", "run", size=10)
    assert ids(*BASE, RUN, copied) == ["copied", "run", "b2", "b1"]


def test_records_in_use_and_their_parents_stay() -> None:
    busy = record("exec", EXEC.description, "run", in_use=True)
    assert ids(*BASE, RUN, busy) == []


def test_base_records_are_ours_when_a_build_failed_at_its_first_step() -> None:
    assert ids(*BASE) == ["b2", "b1"]


def test_a_sent_source_is_known_by_its_size_unless_cut_off() -> None:
    sent = [source("d", "dockerfile", 76), source("c", "context", 198965), source("e", "context", 0)]
    part = source("p", "context", 5000)
    broken = BuildTrace(begun=100.0, ended=150.0, sources=(76, 198965))
    assert sorted(ids(*sent, part)) == ["c", "d", "e"]
    assert sorted(ids(*sent, part, traces=(broken,))) == ["c", "d", "e", "p"]


def test_a_build_without_a_known_end_is_searched_for_an_hour() -> None:
    unseen = BuildTrace(begun=100.0, commands=TRACE.commands)
    soon, late = (record(f"at-{at}", RUN.description, created=at) for at in (3000.0, 9000.0))
    assert ids(soon, late, traces=(unseen,)) == ["at-3000.0"]


def test_traces_of_builds_one_beside_the_other_become_one() -> None:
    beside, apart = (msgspec.structs.replace(TRACE, begun=at, ended=at + 100) for at in (150.0, 201.0))
    other = msgspec.structs.replace(beside, sizes=(1,))
    going = msgspec.structs.replace(beside, ended=None)
    broken = msgspec.structs.replace(beside, whole=False)
    both = merge_traces(TRACE, beside)
    assert both is not None and (both.begun, both.ended) == (100.0, 250.0)
    assert [merge_traces(TRACE, one) for one in (apart, other, going, broken)] == [None] * 4


def test_a_trace_is_handed_on_while_others_need_what_it_tells_of() -> None:
    theirs = record("theirs", "mount / from exec /bin/sh -c echo theirs", "b2", created=500.0)
    gone = [theirs, record("other", "mount / from exec /bin/sh -c echo other")]
    assert find_unfinished([*BASE, theirs], [TRACE]) == [TRACE]
    assert find_unfinished(gone, [TRACE]) == []
