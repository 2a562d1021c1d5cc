"""The sandbox of another machine, by its sandbox server. Start with `sandbox.py`."""
