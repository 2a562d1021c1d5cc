"""The container sandbox, on the Docker API. Start with `sandbox.py`; `sweep.py` removes orphans."""
