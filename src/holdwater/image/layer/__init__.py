"""The agent's files as one layer: packed, self-contained, built once."""
