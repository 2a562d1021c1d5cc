"""The upstream, model and sampling parameters for a session's calls: the gateway's defaults, or its own.

Each call resolves its route anew, so that a run can change its model while sessions continue. The upstreams
are in `upstreams/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .recorder import RequestDelta
from .upstreams import Upstream

NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})


class ModelRoute(NamedTuple):
    """Where a session's calls go. Fields that are not set come from the gateway's default route."""

    upstream: Upstream | None = None
    model: str | None = None  # imposed on every request; None: the agent's choice
    sampling: Mapping[str, Any] = NO_SAMPLING  # imposed in addition to the gateway's
    version: str = ""  # of the policy, if its answers do not name it
    on_written: Callable[[RequestDelta, int], None] | None = (
        None  # receives the number of each recorded exchange
    )

    def with_defaults(self, own: ModelRoute) -> ModelRoute:
        """Return this route, with the gateway's `own` values for fields that are not set."""
        sampling = {**own.sampling, **self.sampling} if self.sampling else own.sampling
        if self.upstream is not None:
            return self._replace(sampling=sampling)
        model, version = self.model or own.model, own.version or self.version
        return self._replace(upstream=own.upstream, model=model, sampling=sampling, version=version)
