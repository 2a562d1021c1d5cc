"""Forks as typed calls: a run that repeats a recorded attempt up to a turn, and goes on from there.

`bisection.py` searches for the turn at which an attempt was lost. Recorded replies are given again by
`conversation/forked_replies.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Unpack

import msgspec

from ..conversation.forked_replies import check_append, check_turn
from ..conversation.trajectory import find_attempt, open_conversation
from ..core.errors import BadInput
from ..core.fork_origin import SEED_STRIDE, ForkOrigin
from ..core.summary import RunSummary
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader
from ..run.setup.config import POLICY_URL, check_requirements, default_directory, make_fork_config
from ..run.setup.options import ForkOptions as ForkOptions
from ..run.setup.options import parse_fork_changes
from ..run.setup.resumption import check_trust
from .process import wait
from .reading import find_instance
from .runs import CallerObjects, RunSetup, set_up_again, start

# Options of a fork that are no settings of a run.
OWN_OPTIONS = ("suite", "agent", "policy", "sample", "attempt", "say", "then_say", "drift", "trust")
STAMP = re.compile(r"^\d{8}-\d{6}-")  # of a default directory


def fork(
    path: str | Path,
    instance: str,
    turn: int,
    *,
    out: str | Path | None = None,
    **options: Unpack[ForkOptions],
) -> RunSummary:
    """Repeat the recorded attempt at an instance up to a turn, then go on with the model; return the summary.

    `say` is the model's reply in that turn, in place of the recorded one; `then_say` is added to it. Settings
    are those of the recorded run, with one sample and one attempt, unless `options` has others.
    """
    return wait(afork(path, instance, turn, out=out, **options))


async def afork(
    path: str | Path,
    instance: str,
    turn: int,
    *,
    out: str | Path | None = None,
    **options: Unpack[ForkOptions],
) -> RunSummary:
    """The async twin of `fork`."""
    return await start(prepare_fork(path, instance, turn, out, options))


def prepare_fork(
    path: str | Path, instance: str, turn: int, out: str | Path | None, options: ForkOptions
) -> RunSetup:
    """Check everything that can be checked before a fork, and create nothing."""
    source = RunDirectory.open(path)
    before = check_trust(source, trust=options.get("trust", False))
    if before.serving is not None or before.recipe is not None:
        kind = "a rollout server" if before.recipe is None else "an image build"
        raise BadInput(f"`{path}` cannot be forked: it is {kind}")
    origin = find_origin(source, instance, turn, options)
    settings = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if options.get("policy") is not None:
        settings = {"model": "policy", **settings, "base_url": POLICY_URL}
    config = make_fork_config(before, origin, parse_fork_changes(before, settings))
    setup = set_up_again(Path(), config, choose_objects(options), options.get("env"))
    check_requirements(setup.suite, config, setup.environment)
    where = Path(out) if out is not None else default_directory(f"{name_origin(path)}-turn-{turn}")
    return msgspec.structs.replace(setup, path=where)


def choose_objects(options: ForkOptions) -> CallerObjects:
    """Return the caller's objects, in place of those that the recorded run names."""
    critic = options.get("critic")
    return CallerObjects(
        options.get("suite"),
        options.get("agent"),
        critic if callable(critic) else None,
        options.get("policy"),
    )


def name_origin(path: str | Path) -> str:
    """Return the name of a run's directory without its time, for the directories of its forks."""
    return STAMP.sub("", Path(path).resolve().name).replace(".", "-")


def find_origin(source: RunDirectory, instance: str, turn: int, options: ForkOptions) -> ForkOrigin:
    """Return the origin of a fork; raise BadInput if its record cannot be repeated up to that turn."""
    say, then_say = options.get("say"), options.get("then_say")
    if say is not None and then_say is not None:
        raise BadInput("`--say` and `--then-say` exclude each other", "`--say` replaces the whole reply")
    if turn < 0:
        raise BadInput(f"`--turn` must be at least 0: {turn}")
    if turn == 0 and (say is not None or then_say is not None):
        raise BadInput("turn 0 has no reply", "`--say` and `--then-say` need `--turn` of at least 1")
    with LedgerReader(source) as reader:
        row = find_attempt(
            reader, find_instance(reader, instance), options.get("sample", 0), options.get("attempt")
        )
        tree = open_conversation(reader, row.attempt)
        acted = reader.attempt(reader.acting_attempt(row.attempt)) or row
    check_turn(tree, turn)
    if then_say is not None:
        check_append(tree, turn, then_say)
    earlier = reader.config.fork
    return ForkOrigin(
        directory=str(source.path.absolute()),
        run=reader.config.id,
        instance=instance,
        sample=acted.sample,
        number=acted.number,
        attempt=acted.attempt,
        turn=turn,
        seed=acted.sample * SEED_STRIDE + acted.round if earlier is None else earlier.seed,
        say=say,
        then_say=then_say,
        drift=options.get("drift", False),
    )
