"""What a conductor and its workers agree on about a run's containers: the daemon, the networks, the labels.

Pure. Containers are made in `sandbox/docker/`; networks, images and orphans are the conductor's, in `run/`.
"""

from __future__ import annotations

from .records import Network, Record

RUN_LABEL = "io.holdwater.run"  # the run's id: on every container and network
ATTEMPT_LABEL = "io.holdwater.attempt"
CONTAINER_PORTS = range(41410, 41540)  # where gateways listen for containers: one port for each worker
HOME_LABEL = "io.holdwater.home"  # whose runs these are: only their orphans are removed


class Containers(Record, frozen=True):
    """Where the containers of a run live."""

    host: str  # the daemon's address
    run: str
    home: str
    gateway: str = ""  # the address of this machine in the network `gateway`; empty: there is none
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there), read-only
    read_only: bool = False

    def network(self, kind: Network) -> str:
        """The name of a network of the run's own."""
        return f"holdwater-{self.run}" if kind is Network.GATEWAY else f"holdwater-{self.run}-{kind}"

    def labels(self, attempt: int | None = None) -> dict[str, str]:
        """What everything of this run carries."""
        of_attempt = {} if attempt is None else {ATTEMPT_LABEL: str(attempt)}
        return {RUN_LABEL: self.run, HOME_LABEL: self.home, **of_attempt}
