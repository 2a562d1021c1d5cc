"""What is taken off a basket, in whole cents."""

THRESHOLD = 5000


def discount(basket):
    """The member discount: a tenth, rounded down to a cent."""
    if basket.member or basket.worth() > THRESHOLD and basket.coupon is None:
        return basket.worth() // 10
    return 0
