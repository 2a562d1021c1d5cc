"""The addresses of the pages: each has one function, which renders it in a thread.

Long work has an address of its own, whose function yields events for a page.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.errors import HoldwaterError, LedgerCorrupt
from .compare_pages import show_comparison, show_parting
from .file_pages import find_in_log, list_salvaged, send_file, send_salvaged, show_log
from .fork_pages import show_branches
from .instance_pages import show_instance, show_instances
from .live import PageWork
from .page import PageRequest, PageResponse, render_error
from .rollout_pages import read_rollout_charts, show_order, show_rollouts
from .run_pages import count_models, read_timeline, show_extremes, show_moment, show_run, show_runs
from .search_pages import build_search_index, search_runs, show_search
from .transcript_pages import find_text, show_outline, show_transcript, show_turns
from .turn_pages import send_blob, send_raw_turn, send_text, show_changes, show_tokens

PAGES: dict[str, Callable[[PageRequest], PageResponse]] = {
    "/": show_runs,
    "/compare": show_comparison,
    "/compare/instance": show_parting,
    "/search": show_search,
    "/runs/{run}": show_run,
    "/runs/{run}/branches": show_branches,
    "/runs/{run}/timeline": read_timeline,
    "/runs/{run}/extremes": show_extremes,
    "/runs/{run}/moment": show_moment,
    "/runs/{run}/rollouts": show_rollouts,
    "/runs/{run}/rollouts/charts": read_rollout_charts,
    "/runs/{run}/orders/{order}": show_order,
    "/runs/{run}/instances": show_instances,
    "/runs/{run}/instances/{instance}": show_instance,
    "/runs/{run}/attempts/{attempt}/log": show_log,
    "/runs/{run}/attempts/{attempt}/log/find": find_in_log,
    "/runs/{run}/attempts/{attempt}/file": send_file,
    "/runs/{run}/attempts/{attempt}/salvage": list_salvaged,
    "/runs/{run}/attempts/{attempt}/salvage/file": send_salvaged,
    "/runs/{run}/attempts/{attempt}/transcript": show_transcript,
    "/runs/{run}/attempts/{attempt}/turns": show_turns,
    "/runs/{run}/attempts/{attempt}/outline": show_outline,
    "/runs/{run}/attempts/{attempt}/find": find_text,
    "/runs/{run}/attempts/{attempt}/changes": show_changes,
    "/runs/{run}/attempts/{attempt}/tokens": show_tokens,
    "/runs/{run}/attempts/{attempt}/text": send_text,
    "/runs/{run}/attempts/{attempt}/raw": send_raw_turn,
    "/runs/{run}/blobs/{blob}": send_blob,
}

WORK: dict[str, Callable[[PageRequest], PageWork]] = {
    "/search/hits": search_runs,
    "/search/index": build_search_index,
    "/runs/{run}/models": count_models,
}


def show_page(route: str, asked: PageRequest) -> PageResponse:
    """Return a page; if it cannot be shown, a page that says why."""
    try:
        return PAGES[route](asked).begin()
    except HoldwaterError as error:
        return render_error(500 if isinstance(error, LedgerCorrupt) else 404, error.message, error.hint)
    except OSError as error:  # a file vanished while the page was made, or may not be read
        return render_error(404, f"cannot read `{error.filename}`: {error.strerror}")
