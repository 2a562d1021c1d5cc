cat > bill.py <<'EOF'
"""Shares a bill among people."""

from decimal import Decimal


def format_cents(cents):
    """1234 -> "12.34"."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def parse_cents(amount):
    """"12.34" -> 1234."""
    return int(Decimal(amount) * 100)


def split(amount, people):
    """The share of each of `people`, as text."""
    cents = parse_cents(amount)
    sign = -1 if cents < 0 else 1
    share, rest = divmod(abs(cents), people)
    return [format_cents(sign * (share + (i < rest))) for i in range(people)]
EOF
