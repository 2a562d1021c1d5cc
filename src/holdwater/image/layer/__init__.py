"""The agent's files as one layer: packed, made self-contained, built once."""
