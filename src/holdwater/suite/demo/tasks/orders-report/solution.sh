cat > report.py <<'EOF'
"""The sales report."""

QUERY = """
    SELECT
        name,
        (SELECT count(*) FROM orders WHERE customer = customers.id) AS orders,
        (SELECT coalesce(sum(cents), 0) FROM orders WHERE customer = customers.id) AS total,
        (SELECT count(*) FROM notes WHERE customer = customers.id) AS notes
    FROM customers
    WHERE :name IS NULL OR name = :name
    ORDER BY total DESC, name
"""


def report(db, name=None):
    """(name, orders, cents, notes) of each customer, or of the customers called `name`."""
    return db.execute(QUERY, {"name": name}).fetchall()
EOF
