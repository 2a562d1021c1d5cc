"""The names that a conductor and its workers share for a run's containers: daemon, networks, labels.

Pure. `sandbox/docker/` makes containers; the conductor manages networks, images and orphans in `run/`.
"""

from __future__ import annotations

from .records import Network, Record

RUN_LABEL = "io.holdwater.run"  # the run's id, on every container and network
ATTEMPT_LABEL = "io.holdwater.attempt"
CONTAINER_PORTS = range(41410, 41540)  # gateways listen for containers on these: one port for each worker
HOME_LABEL = "io.holdwater.home"  # identifies the holdwater home: only orphans of the same home are removed


class Containers(Record, frozen=True):
    """The docker daemon, networks and mounts of a run's containers."""

    host: str  # the daemon's address
    run: str
    home: str
    gateway: str = ""  # the address of this machine in the network `gateway`; empty: there is no such network
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there), read-only
    read_only: bool = False

    def network(self, kind: Network) -> str:
        """Return the name of the run's own network of this kind."""
        return f"holdwater-{self.run}" if kind is Network.GATEWAY else f"holdwater-{self.run}-{kind}"

    def labels(self, attempt: int | None = None) -> dict[str, str]:
        """Return the labels of a resource of this run."""
        of_attempt = {} if attempt is None else {ATTEMPT_LABEL: str(attempt)}
        return {RUN_LABEL: self.run, HOME_LABEL: self.home, **of_attempt}
