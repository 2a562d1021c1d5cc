"""Reads recorded exchanges as conversations: turns, threads, message nodes and token sequences."""
