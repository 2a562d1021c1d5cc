"""The sales report."""


def report(db, name=None):
    """(name, orders, cents, notes) of each customer, or of the customers called `name`."""
    where = f"WHERE customers.name = '{name}'" if name else ""
    query = f"""
        SELECT customers.name, count(orders.id), sum(orders.cents), count(notes.id)
        FROM customers
        JOIN orders ON orders.customer = customers.id
        LEFT JOIN notes ON notes.customer = customers.id
        {where}
        GROUP BY customers.id
        ORDER BY customers.name
    """
    return db.execute(query).fetchall()
