"""Where the agent acts. `process.py` is the embedded sandbox: a process tree, in bubblewrap if it works."""
