import unittest
from fractions import Fraction

from bill import format_cents, parse_cents, split


class Split(unittest.TestCase):
    def test_no_cent_is_lost(self):
        self.assertEqual(split("10.00", 3), ["3.34", "3.33", "3.33"])

    def test_even_shares(self):
        self.assertEqual(split("9.00", 3), ["3.00"] * 3)

    def test_fewer_cents_than_people(self):
        self.assertEqual(split("0.02", 3), ["0.01", "0.01", "0.00"])

    def test_a_refund(self):
        self.assertEqual(split("-10.00", 3), ["-3.34", "-3.33", "-3.33"])

    def test_less_than_one_of_a_refund(self):
        self.assertEqual(split("-0.05", 2), ["-0.03", "-0.02"])

    def test_every_cent_is_read(self):
        for cents in range(0, 20000):
            self.assertEqual(parse_cents(f"{cents // 100}.{cents % 100:02d}"), cents)

    def test_large_amounts_are_exact(self):
        self.assertEqual(parse_cents("90071992547409.93"), 9007199254740993)
        self.assertEqual(format_cents(9007199254740993), "90071992547409.93")

    def test_shares_add_up(self):
        for cents in (1, 99, 1999, 12345, -12345):
            for people in (1, 2, 3, 7, 11):
                shares = [Fraction(s) for s in split(format_cents(cents), people)]
                self.assertEqual(sum(shares), Fraction(cents, 100))
                self.assertLessEqual(max(shares) - min(shares), Fraction(1, 100))
