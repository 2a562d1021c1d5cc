"""How many files a process may have open: each connection is one, and so is much of what attempts do."""

from __future__ import annotations

import resource

MOST_FILES = 65536  # open at once: a client's connection is one


def allow_files() -> None:
    """Raise the limit of this process as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
