import unittest

from slugs import slug


class Slugs(unittest.TestCase):
    def test_accents_go_away(self):
        self.assertEqual(slug("Cr\u00e8me br\u00fbl\u00e9e"), "creme-brulee")

    def test_a_combining_mark_is_the_same_accent(self):
        self.assertEqual(slug("Cre\u0300me"), "creme")

    def test_sharp_s(self):
        self.assertEqual(slug("Stra\u00dfe"), "strasse")

    def test_capital_dotted_i(self):
        self.assertEqual(slug("\u0130zmir"), "izmir")

    def test_runs_become_one_hyphen(self):
        self.assertEqual(slug("Rock  &  Roll"), "rock-roll")

    def test_no_hyphens_at_the_ends(self):
        self.assertEqual(slug("  What?! "), "what")

    def test_plain_titles_stay(self):
        self.assertEqual(slug("Python 3 in 2024"), "python-3-in-2024")
