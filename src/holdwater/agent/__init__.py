"""Agents act on instances. `loader.py` finds an agent by name; plugins add agents by entry points."""
