"""Fleets host attempts, in worker processes or in the conductor; `interface.py` is their interface."""
