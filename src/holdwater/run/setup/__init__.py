"""Decisions before a run starts: options, environment, keys, trust, and the changes of a resume."""
