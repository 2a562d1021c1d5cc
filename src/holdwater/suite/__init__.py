"""Suites: what yields instances and grades. `load.py` finds one by name; others come by entry points."""
