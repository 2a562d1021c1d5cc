"""The containers of one run, and the state that they share. `sandbox.py` has the sandbox itself."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from ...core.containers import Containers
from ...core.records import Limits, Network, SandboxSpec
from ...docker.client import DockerClient
from .daemon_facts import FactCache
from .sandbox import DockerSandbox

THREADS = 4


class DockerSandboxes:
    """Opens containers of a run; `client` must stay open as long as they are."""

    def __init__(
        self,
        client: DockerClient,
        containers: Containers,
        network: Network,
        threads: Executor | None = None,
    ) -> None:
        self.client = client
        self.containers = containers
        self.network = network
        self.threads = threads or ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-container")
        self.facts = FactCache(client)
        self.networks = {one: containers.network(one) for one in Network} | {Network.NONE: "none"}
        self.search = tuple(f"{there}/bin" for here, there in containers.mounts if Path(here, "bin").is_dir())

    def open(self, attempt: int, limits: Limits, gateway: Path | None, start: SandboxSpec) -> DockerSandbox:
        """Return a sandbox for this attempt; nothing is created before its first use."""
        return DockerSandbox(self, attempt, limits, start)

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """Return the gateway's base URL for code in a sandbox: the host's URL, which containers can reach."""
        return host_url
