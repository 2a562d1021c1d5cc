"""Types and functions that several verbs share: flags, and the lookup of a run by directory or `latest`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..ledger.directory import LATEST as LATEST
from ..ledger.directory import RUNS as RUNS
from ..ledger.directory import find_run as find_run

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
