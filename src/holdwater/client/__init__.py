"""The client of a server: rollouts and groups, asked for from async code or plain code."""
