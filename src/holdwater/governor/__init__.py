"""Measures what a run uses against what it may use. `meter.py` reads; nothing here acts on it yet."""
