"""The serving side of a run: orders, model calls that a trainer answers, and the server's statistics."""
