"""The front door for trainers: HTTP in front of `run/desk.py`. It decides nothing and keeps nothing.

`door.py` listens, `orders.py` is what is asked of it, `follow.py` what is told on the way.
"""

from .door import Door as Door
from .terms import DoorTerms as DoorTerms
