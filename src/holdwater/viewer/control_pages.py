"""The buttons that control a running run: a form of its page, or of an instance, becomes a request to it.

The view writes nothing itself. Only forms of its own pages have the token that a request needs.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from ..core.control import (
    AddNote,
    AnyRequest,
    CancelInstance,
    ChangeRun,
    PauseRun,
    RetryInstance,
    StopConductor,
    UnpauseRun,
)
from ..core.errors import BadInput, HoldwaterError, RequestRefused
from ..run.conductor.control_client import send_request
from .page import PageRequest, PageResponse, quote_part, render_error

CONTROL_ROUTE = "/runs/{run}/control/{verb}"
CONFLICT = 409  # the HTTP status for a request that the run refuses

REQUESTS: dict[str, Callable[[PageRequest], AnyRequest]] = {
    "pause": lambda asked: PauseRun(),
    "unpause": lambda asked: UnpauseRun(),
    "stop": lambda asked: StopConductor(),
    "set": lambda asked: ChangeRun(settings=read_settings(asked.query.get("settings", ""))),
    "cancel": lambda asked: CancelInstance(
        instance=asked.query.get("instance", ""), sample=asked.read_number("sample")
    ),
    "retry": lambda asked: RetryInstance(
        instance=asked.query.get("instance", ""), sample=asked.read_number("sample")
    ),
    "note": lambda asked: AddNote(text=asked.query.get("text", "")),
}


def check_form(asked: PageRequest) -> None:
    """Raise `RequestRefused` unless the request comes from a form of a view that may change something."""
    if not asked.form_token:
        raise RequestRefused("read_only", "this view only reads", "start it without `--read-only`")
    if not hmac.compare_digest(asked.query.get("form", "").encode(), asked.form_token.encode()):
        raise RequestRefused("foreign", "the form is not of this view", "load its page again")


def control_run(asked: PageRequest) -> PageResponse:
    """Send the request of a form; return to the page that has the form."""
    check_form(asked)
    make_request = REQUESTS.get(asked.parts["verb"])
    if make_request is None:
        return render_error(404, f"no such request to a run: `{asked.parts['verb'][:80]}`")
    try:
        send_request(asked.pool.find(asked.run).path, make_request(asked))
    except HoldwaterError as error:
        return render_error(CONFLICT, error.message, error.hint)
    name, page = asked.query.get("instance"), f"/runs/{quote_part(asked.run)}"
    if name is not None:
        page += f"/instances/{quote_part(name)}?sample={asked.read_number('sample')}"
    return PageResponse(b"", location=page)


def read_settings(text: str) -> dict[str, str]:
    """Return the settings of `concurrency=40 memory=16GiB`."""
    settings = dict(word.partition("=")[::2] for word in text.split())
    if not all(settings.values()):
        raise BadInput(f"settings must look like `concurrency=40 memory=16GiB`: `{text[:200]}`")
    return settings
