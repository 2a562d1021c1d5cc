"""What several verbs take: flags, and a run named by its directory or as the latest."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..ledger.latest import LATEST as LATEST
from ..ledger.latest import RUNS as RUNS
from ..ledger.latest import find_run as find_run

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
