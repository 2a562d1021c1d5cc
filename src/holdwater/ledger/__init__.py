"""The durable record of a run: SQLite for events and results, segments for exchanges, blobs for media.

Start reading at `directory.py`, then `ledger.py` (the only writer) and `reader.py`.
"""
