"""Runs attempts: `attempt.py` runs one, `host.py` many on one loop, `worker.py` a host in its own process."""
