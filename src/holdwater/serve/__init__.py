"""The HTTP server for trainers, in front of `run/orders/order_service.py`. It decides and stores nothing.

`rollout_server.py` listens, `orders.py` handles requests about orders, and `event_stream.py` streams events.
"""

from .rollout_server import RolloutServer as RolloutServer
from .settings import ServerSettings as ServerSettings
