import unittest

from shop.basket import Basket
from shop.discount import discount


def basket(cents, **how):
    made = Basket(**how)
    made.add(cents)
    return made


class Discount(unittest.TestCase):
    def test_members_get_a_tenth(self):
        self.assertEqual(discount(basket(12345, member=True)), 1234)

    def test_the_threshold_counts(self):
        self.assertEqual(discount(basket(5000, member=True)), 500)

    def test_below_the_threshold_there_is_none(self):
        self.assertEqual(discount(basket(4999, member=True)), 0)

    def test_others_get_none(self):
        self.assertEqual(discount(basket(20000)), 0)

    def test_a_coupon_switches_it_off(self):
        self.assertEqual(discount(basket(20000, member=True, coupon="SPRING")), 0)
