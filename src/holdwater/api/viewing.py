"""Serves the browser view of runs, or writes it to files, as `holdwater view` does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..core.environment import build_python_environment
from ..core.errors import BadInput
from ..ledger.directory import RUNS
from ..rollout.allocator import keep_bounded
from ..run.setup.config import read_environment
from ..serve.settings import ServerSettings
from ..viewer.export import ExportReport, export_instance, export_runs
from ..viewer.run_pool import RunPool
from ..viewer.server import ViewServer
from ..viewer.static_links import ExportSelection as ExportSelection

BESIDE = "import sys; from holdwater.api.viewing import serve_beside; serve_beside(sys.argv[1])"
PR_SET_PDEATHSIG = 1  # from `linux/prctl.h`
NICENESS = 5  # where processor time is short, the run comes first


def serve_view(
    roots: Sequence[str | os.PathLike[str]],
    announce: Callable[[str, str], None],
    *,
    listen: str = "127.0.0.1:0",
    hosts: Sequence[str] = (),
    read_only: bool = False,
) -> None:
    """Serve the runs below `roots` (default: `runs/`) until Ctrl-C; `announce` gets address and token.

    A view that is not `read_only` has buttons that control running runs.
    """
    settings = ServerSettings(listen=listen, hosts=tuple(hosts))
    keep_bounded()
    asyncio.run(_serve(ViewServer(open_pool(roots), settings, read_only=read_only), announce))


def open_pool(roots: Sequence[str | os.PathLike[str]]) -> RunPool:
    """Return the runs below `roots`, by default below `runs/`."""
    places = [Path(root) for root in roots] or [RUNS]
    for place in places:
        if not place.is_dir():
            raise BadInput(f"no such directory: `{place}`", "make a run: `holdwater run demo`")
    return RunPool(places, read_environment().cache)


def export_view(
    roots: Sequence[str | os.PathLike[str]],
    out: Path,
    tell: Callable[[str], None],
    *,
    wanted: ExportSelection = ExportSelection(),  # noqa: B008
    force: bool = False,
) -> ExportReport:
    """Write the pages about the runs below `roots` to a new directory; `tell` gets the progress."""
    return export_runs(open_pool(roots), out, wanted, tell, force=force)


def export_instance_view(
    roots: Sequence[str | os.PathLike[str]], instance: str, out: Path, tell: Callable[[str], None]
) -> ExportReport:
    """Write one instance of a run, with its conversations, as one HTML file."""
    return export_instance(open_pool(roots), instance, out, tell)


async def _serve(view: ViewServer, announce: Callable[[str, str], None]) -> None:
    async with view as server:
        announce(server.address, server.token)
        await asyncio.Event().wait()


@contextmanager
def open_view(directory: Path) -> Iterator[str]:
    """Serve one run in a process of its own, which ends with this one; yield the address to open."""
    words = [sys.executable, "-c", BESIDE, str(directory)]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=build_python_environment(),
        start_new_session=True,  # Ctrl-C is for the run
    )
    try:
        assert process.stdout is not None
        with process.stdout as printed:
            yield printed.readline().decode().strip()
    finally:
        process.kill()
        process.wait()


def serve_beside(directory: str) -> None:
    """Serve a run until the parent process ends; print the address as the first line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(NICENESS)
    serve_view([directory], lambda address, token: print(f"{address}/?token={token}", flush=True))  # noqa: T201
