"""Says whether a path that a suite names stays in the suite's own directory, all links followed.

A suite may come from a stranger: it brings its own files into a sandbox, and no others of this machine.
"""

from __future__ import annotations

import os
from pathlib import Path


def leads_out(path: Path, root: Path) -> bool:
    """Whether `path`, which need not be there, is neither `root` nor below it; a loop of links stays."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
