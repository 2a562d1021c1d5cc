cat > pager.py <<'EOF'
"""Cuts a listing into pages."""


def page_count(total, per_page):
    """How many pages `total` items need."""
    return -(-total // per_page)


def page(items, number, per_page):
    """The items on page `number`, from 1."""
    if number < 1:
        return []
    start = (number - 1) * per_page
    return items[start : start + per_page]
EOF
