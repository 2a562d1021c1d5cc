"""The conductor's side of a run. `execute.py` is the entry; `conductor/scheduler.py` carries out the plan."""
