"""Who answers the calls of a session, and how they are asked: the gateway's own, or the session's.

Each call looks anew, so that a run's model can be changed under sessions that go on. The upstreams themselves
are in `upstreams/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .recorder import Delta
from .upstreams import Upstream

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Behind(NamedTuple):
    """What stands behind a session. What it does not say, the gateway's own does."""

    upstream: Upstream | None = None
    model: str | None = None  # imposed on every request; None: as the agent asks
    sampling: Mapping[str, Any] = NOTHING  # imposed beside what the gateway imposes
    version: str = ""  # of the policy, where its answers do not say it themselves
    written: Callable[[Delta, int], None] | None = None  # told the number of each exchange in the record

    def over(self, own: Behind) -> Behind:
        """This one, with the gateway's `own` where it says nothing."""
        sampling = {**own.sampling, **self.sampling} if self.sampling else own.sampling
        if self.upstream is not None:
            return self._replace(sampling=sampling)
        model, version = self.model or own.model, own.version or self.version
        return self._replace(upstream=own.upstream, model=model, sampling=sampling, version=version)
