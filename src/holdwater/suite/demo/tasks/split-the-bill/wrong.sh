cat > bill.py <<'EOF'
"""Shares a bill among people."""


def format_cents(cents):
    """1234 -> "12.34"."""
    return f"{cents / 100:.2f}"


def parse_cents(amount):
    """"12.34" -> 1234."""
    return round(float(amount) * 100)


def split(amount, people):
    """The share of each of `people`, as text."""
    share, rest = divmod(parse_cents(amount), people)
    return [format_cents(share + (1 if i < rest else 0)) for i in range(people)]
EOF
