cat > billing.py <<'EOF'
"""When subscriptions are billed."""

from calendar import monthrange
from datetime import date


def add_months(day, months):
    """`day` moved by `months`, which may be negative."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))


def schedule(start, count):
    """The first `count` billing days of a subscription that started on `start`."""
    return [add_months(start, months) for months in range(count)]
EOF
