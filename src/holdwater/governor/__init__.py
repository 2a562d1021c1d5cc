"""Measures memory, disk and CPU against their limits (`meter.py`, `cpu.py`) and grants leases (`gate.py`)."""
