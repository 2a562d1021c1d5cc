"""Tasksets of verifiers as suites: `vf:MODULE[:CLASS]` or `vf:PATH[:CLASS]`, with options after a `?`.

The package `verifiers` is no dependency: it is imported where tasks are listed (`listing.py`) and scored
(`scoring.py`), and nowhere else. `tasks.py` has what needs no package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import util

from ...core.authoring import Agent, Suite, SuiteDefaults
from ...core.errors import BadInput
from ...core.records import Instance
from .harness import NAME_PREFIX
from .listing import TaskListing
from .scoring import TasksetScorer
from .tasks import PREFIX, TasksetSpec, make_absolute, parse_spec

__all__ = ["PREFIX", "load_taskset", "make_absolute"]

INSTALL = "pip install verifiers"

_log = logging.getLogger(__name__)


def load_taskset(spec: str) -> Suite:
    """Return the suite of a taskset. It imports nothing: `check` does, in another process."""
    parsed = parse_spec(spec)
    listing, scorer = TaskListing(spec), TasksetScorer(parsed)

    def read_instances() -> Iterator[Instance]:
        if stops := ", ".join(f"`{name}`" for name in listing.facts.stops):
            _log.warning("taskset `%s`: `@stop` is not evaluated: %s", listing.facts.name, stops)
        yield from listing.read_instances()

    def check() -> None:
        if util.find_spec("verifiers") is None:
            raise BadInput("the package `verifiers` is not installed", f"`{INSTALL}`, beside holdwater")
        assert listing.facts

    def check_agent(agent: Agent) -> None:
        check()
        if listing.facts.toolsets and not agent.name.startswith(NAME_PREFIX):
            names = ", ".join(f"`{name}`" for name in listing.facts.toolsets)
            raise BadInput(
                f"taskset `{listing.facts.name}` has tool servers, which agent `{agent.name}` is not given:"
                f" {names}",
                "leave `--agent` out: a harness of verifiers is given them",
            )

    return Suite(
        name=parsed.path.stem if parsed.path is not None else parsed.name,
        instances=read_instances,
        grade=scorer.grade,
        setup=scorer.set_up,
        check=check,
        check_agent=check_agent,
        group=scorer.score_group if parsed.env else None,
        fresh=False,
        hidden=_find_sources(parsed),
        defaults=SuiteDefaults(agent="holdwater.suite.verifiers.harness:own"),
        description="a taskset of verifiers",
    )


def _find_sources(spec: TasksetSpec) -> tuple[str, ...]:
    """Return the taskset's own files, which may hold answers. It finds a module without importing it."""
    if spec.path is not None:
        return (str(spec.path.absolute()),)
    try:
        found = util.find_spec(spec.name.partition(".")[0].replace("-", "_"))
    except (ImportError, ValueError):
        return ()
    if found is None or found.origin is None or found.name == "verifiers":
        return ()
    return tuple(found.submodule_search_locations or (found.origin,))
