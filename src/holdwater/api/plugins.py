"""Lists the suites and agents that have a name, for `holdwater suites` and `holdwater agents`."""

from __future__ import annotations

from ..agent.loader import OTHER_SPECS as OTHER_AGENTS
from ..agent.loader import list_agents
from ..plugin import PluginEntry
from ..suite.loader import OTHER_SPECS as OTHER_SUITES
from ..suite.loader import list_suites

__all__ = ["OTHER_AGENTS", "OTHER_SUITES", "PluginEntry", "list_agents", "list_suites"]
