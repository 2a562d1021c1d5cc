"""Names for URLs."""

import re


def slug(title):
    """`title` in lower case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]", "-", title.lower())
