"""`python -m holdwater`: the command."""

from __future__ import annotations

import sys

from .cli import command

sys.exit(command())
