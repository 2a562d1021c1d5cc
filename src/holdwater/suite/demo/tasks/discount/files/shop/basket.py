"""A basket of goods; all amounts are whole cents."""


class Basket:
    def __init__(self, member=False, coupon=None):
        self.member = member
        self.coupon = coupon
        self.lines = []

    def add(self, cents, count=1):
        self.lines.append((cents, count))

    def worth(self):
        return sum(cents * count for cents, count in self.lines)
