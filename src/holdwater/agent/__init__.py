"""Agents: what acts. `load.py` finds one by name; others come by entry points."""
