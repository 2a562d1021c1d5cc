"""Measures memory, disk and CPU, grants leases (`leases.py`) and reclaims memory (`memory_control.py`)."""
