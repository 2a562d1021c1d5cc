"""Arguments and flags that many verbs share. `run_flags.py` makes those of a run from its configuration."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
LatestRun = Annotated[
    str | None, Parameter(help="The run's directory; `latest` (the default) is the newest in `runs/`.")
]
NamedRun = Annotated[str, Parameter(help="The run's directory; `latest` is the newest in `runs/`.")]
Trust = Annotated[Flag, Parameter(help="Import the code that a run of another user names.")]
Quiet = Annotated[Flag, Parameter(help="Show no live display and no closing page.")]
ReplyJson = Annotated[Flag, Parameter(help="Print the reply as one JSON document.")]
InstanceId = Annotated[str, Parameter(help="The id of an instance of the run.")]
SampleNumber = Annotated[
    int | None,
    Parameter(help="Only this sample: 0, 1, 2, ... (default: all samples of the instance)"),
]
