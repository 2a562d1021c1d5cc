"""Shares a bill among people."""


def format_cents(cents):
    """1234 -> "12.34"."""
    return f"{cents / 100:.2f}"


def parse_cents(amount):
    """"12.34" -> 1234."""
    return int(float(amount) * 100)


def split(amount, people):
    """The share of each of `people`, as text."""
    share = float(amount) / people
    return [str(share)] * people
