"""Types and functions that several verbs share: flags, and the lookup of a run by directory or `latest`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..ledger.run_lookup import LATEST as LATEST
from ..ledger.run_lookup import RUNS as RUNS
from ..ledger.run_lookup import find_run as find_run

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
