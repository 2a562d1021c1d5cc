"""The conductor's side of a run. `execute.py` is the way in; `scheduler.py` does what the planner decides."""
