"""Suites yield instances and grade them. `loader.py` finds a suite by name; entry points add others."""
