import unittest
from datetime import date

from billing import add_months, schedule


class Billing(unittest.TestCase):
    def test_the_last_day_stands_in_for_a_missing_one(self):
        self.assertEqual(add_months(date(2023, 1, 31), 1), date(2023, 2, 28))
        self.assertEqual(add_months(date(2024, 1, 31), 1), date(2024, 2, 29))

    def test_into_december(self):
        self.assertEqual(add_months(date(2023, 11, 15), 1), date(2023, 12, 15))

    def test_over_the_year(self):
        self.assertEqual(add_months(date(2023, 12, 15), 1), date(2024, 1, 15))
        self.assertEqual(add_months(date(2023, 3, 31), 20), date(2024, 11, 30))

    def test_backwards(self):
        self.assertEqual(add_months(date(2024, 1, 31), -2), date(2023, 11, 30))
        self.assertEqual(add_months(date(2024, 1, 31), -1), date(2023, 12, 31))

    def test_a_schedule_comes_back_to_its_day(self):
        days = schedule(date(2023, 1, 31), 4)
        self.assertEqual(days, [date(2023, 1, 31), date(2023, 2, 28), date(2023, 3, 31), date(2023, 4, 30)])

    def test_a_schedule_of_one(self):
        self.assertEqual(schedule(date(2023, 5, 1), 1), [date(2023, 5, 1)])
