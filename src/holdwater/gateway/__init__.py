"""The gateway receives the agents' model calls: one listener per worker, one session and key per attempt.

It forwards calls to an upstream and records each exchange before its last byte leaves. Start at `server.py`.
"""
