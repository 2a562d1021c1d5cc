import unittest

from mail import fill


class Fill(unittest.TestCase):
    def test_one(self):
        self.assertEqual(fill("Hello {{name}}!", {"name": "Ada"}), "Hello Ada!")

    def test_two_on_a_line(self):
        self.assertEqual(fill("{{a}} and {{b}} and {{a}}", {"a": 1, "b": 2}), "1 and 2 and 1")

    def test_spaces(self):
        self.assertEqual(fill("{{ a }}{{b }}", {"a": "x", "b": "y"}), "xy")

    def test_an_unknown_name_stays(self):
        self.assertEqual(fill("{{ who }} {{a}}", {"a": "x"}), "{{ who }} x")

    def test_backslashes(self):
        self.assertEqual(fill("{{path}}", {"path": r"C:\new\1\g<0>"}), r"C:\new\1\g<0>")

    def test_values_are_not_filled_in_again(self):
        self.assertEqual(fill("{{a}} {{b}}", {"a": "{{b}}", "b": "x"}), "{{b}} x")

    def test_names_are_no_patterns(self):
        self.assertEqual(fill("{{a.b}} {{a+}}", {"a.b": "x", "a+": "y"}), "x y")

    def test_an_empty_value_is_a_value(self):
        self.assertEqual(fill("[{{a}}]", {"a": ""}), "[]")
