"""The user's settings over the defaults."""

import json
from pathlib import Path


def merge(defaults, user):
    """`defaults` with the user's settings in their place."""
    defaults.update(user)
    return defaults


def load(directory="."):
    base = Path(directory)
    defaults = json.loads((base / "defaults.json").read_text())
    user = base / "user.json"
    return merge(defaults, json.loads(user.read_text())) if user.exists() else defaults
