"""The model that scores: judges call it through the gateway, which records their calls as the grader's.

Without these options judges call the model of the attempt that they score.
"""

from __future__ import annotations

from typing import Annotated

from .options import ConfigOption, OptionGroup
from .prices import ModelPrice
from .records import Record


class JudgeModel(Record, frozen=True):
    """The model of judges. Its key is no part of the configuration."""

    name: Annotated[
        str | None,
        ConfigOption(
            OptionGroup.CHOICE,
            "The model that judges call (default: the run's; with `--judge-base-url` the one that they name)",
            name="judge_model",
        ),
    ] = None
    url: Annotated[
        str | None,
        ConfigOption(
            OptionGroup.CHOICE,
            "The URL of the judges' server; `JUDGE_API_KEY` sets its key (default: the run's server)",
            name="judge_base_url",
            resume="The URL of the judges' server",
            live=False,
        ),
    ] = None
    price: ModelPrice | None = None  # when the run was created; None: unknown

    @property
    def given(self) -> bool:
        """Whether judges call another model than that of their attempt."""
        return self.name is not None or self.url is not None
