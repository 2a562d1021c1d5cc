"""Sandboxes for agents. Start with `process.py`: a process tree, in bubblewrap where that works."""
