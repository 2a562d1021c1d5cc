"""Raises the limit on open files: each connection is one, and attempts open many more."""

from __future__ import annotations

import resource

MOST_FILES = 65536  # open at once, connections of clients included


def allow_files() -> None:
    """Raise the limit of this process as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
