"""When subscriptions are billed."""

from datetime import date


def add_months(day, months):
    """`day` moved by `months`, which may be negative."""
    month = day.month + months
    return date(day.year + month // 12, month % 12, day.day)


def schedule(start, count):
    """The first `count` billing days of a subscription that started on `start`."""
    days = [start]
    while len(days) < count:
        days.append(add_months(days[-1], 1))
    return days
