"""Writes a finished or running run in formats of other tools. `formats.py` chooses the writer of a format."""
