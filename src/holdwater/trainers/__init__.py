"""Adapters between rollout servers and trainers: `trl`, `trl_async`, `verl` and `skyrl`, one module each.

None of them imports its trainer before it is used, and holdwater depends on no trainer. `token_rows.py` makes
rows of rollouts; `client/` orders the rollouts.
"""
