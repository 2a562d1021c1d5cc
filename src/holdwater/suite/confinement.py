"""Checks whether a path named by a suite stays in the suite's own directory, with all links followed.

A suite may come from an untrusted source: it may copy its own files into a sandbox, but no other file of this
machine.
"""

from __future__ import annotations

import os
from pathlib import Path


def leads_out(path: Path, root: Path) -> bool:
    """Return whether `path` (which need not exist) lies outside `root`; a loop of links counts as inside."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
