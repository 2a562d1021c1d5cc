"""The durable truth of a run: SQLite for what happened, segments for exchanges, blobs for media.

Start reading at `directory.py`, then `ledger.py` (the only writer) and `reader.py`.
"""
