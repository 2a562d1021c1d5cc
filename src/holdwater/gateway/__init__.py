"""Where the agents' model calls arrive: a listener for each worker, a session and a key for each attempt.

It passes calls to an upstream and records each exchange before its last byte leaves. Start at `server.py`.
"""
