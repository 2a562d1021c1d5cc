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
from .environment import EnvironmentScorer, is_older_version, play
from .harness import NAME_PREFIX
from .listing import TaskListing
from .scoring import TasksetScorer
from .tasks import PREFIX, TasksetSpec, make_absolute, parse_spec

__all__ = ["PREFIX", "load_taskset", "make_absolute"]

INSTALL = "pip install verifiers"

_log = logging.getLogger(__name__)


def load_taskset(spec: str) -> Suite:
    """Return the suite of a taskset. It imports nothing: its check does, in another process."""
    return _load_environment(spec) if is_older_version() else _load_taskset(spec)


def _load_taskset(spec: str) -> Suite:
    parsed, listing = parse_spec(spec), TaskListing(spec)
    scorer = TasksetScorer(parsed)

    def read_instances() -> Iterator[Instance]:
        if stops := ", ".join(f"`{name}`" for name in listing.facts.stops):
            _log.warning("taskset `%s`: `@stop` is not evaluated: %s", listing.facts.name, stops)
        yield from listing.read_instances()

    def check_agent(agent: Agent) -> None:
        _check_package(listing)
        if agent.name.startswith(NAME_PREFIX):
            return
        if listing.facts.toolsets:
            names = ", ".join(f"`{name}`" for name in listing.facts.toolsets)
            raise BadInput(
                f"taskset `{listing.facts.name}` has tool servers, which agent `{agent.name}` is not given:"
                f" {names}",
                "leave `--agent` out: a harness of verifiers is given them",
            )
        if listing.facts.player:
            raise BadInput(
                f"environment `{listing.facts.player}` drives the turns of a harness of verifiers,"
                f" which agent `{agent.name}` is not",
                "leave `--agent` out",
            )

    return Suite(
        name=_name_suite(parsed),
        instances=read_instances,
        grade=scorer.grade,
        setup=scorer.set_up,
        check_agent=check_agent,
        group=scorer.score_group if parsed.env else None,
        fresh=False,
        hidden=_find_sources(parsed),
        defaults=SuiteDefaults(agent="holdwater.suite.verifiers.harness:own"),
        description="a taskset of verifiers",
    )


def _load_environment(spec: str) -> Suite:
    parsed, listing = parse_spec(spec), TaskListing(spec)
    scorer = EnvironmentScorer(parsed)

    def check_agent(agent: Agent) -> None:
        _check_package(listing)
        if agent.act is not play:
            raise BadInput(
                f"environment `{listing.facts.name}` plays its own turns: `--agent {agent.name}`",
                "leave `--agent` out",
            )

    return Suite(
        name=_name_suite(parsed),
        instances=listing.read_instances,
        grade=scorer.grade,
        check_agent=check_agent,
        group=scorer.score_group if parsed.env else None,
        defaults=SuiteDefaults(agent="holdwater.suite.verifiers.environment:AGENT"),
        description="an environment of verifiers 0.1",
    )


def _check_package(listing: TaskListing) -> None:
    if util.find_spec("verifiers") is None:
        raise BadInput("the package `verifiers` is not installed", f"`{INSTALL}`, beside holdwater")
    assert listing.facts


def _name_suite(spec: TasksetSpec) -> str:
    return spec.path.stem if spec.path is not None else spec.name


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
