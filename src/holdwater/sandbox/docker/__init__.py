"""The container sandbox, through the engine's API. Begin with `sandbox.py`; what dead runs left: `sweep.py`."""
