"""Pages about runs for a browser. They only read; `server.py` serves them."""
