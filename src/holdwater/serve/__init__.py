"""The front door for trainers: HTTP in front of `run/desk.py`. It decides nothing and keeps nothing."""
