"""The container sandbox, through the engine's API: begin with `sandbox.py`; orphans are `sweep.py`'s."""
