"""Types of flags that many verbs share. `run_flags.py` makes those of a run from its configuration."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
