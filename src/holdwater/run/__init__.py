"""Runs: the conductor's side. `execute.py` is the way in; `scheduler.py` carries out what the planner decides."""
