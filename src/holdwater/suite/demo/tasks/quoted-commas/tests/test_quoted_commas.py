import unittest
from pathlib import Path

from addresses import addresses, fields


class Fields(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(fields("a,b,c"), ["a", "b", "c"])

    def test_a_comma_in_quotes(self):
        self.assertEqual(fields('"Miller, Anna",Berlin'), ["Miller, Anna", "Berlin"])

    def test_a_quote_written_twice(self):
        self.assertEqual(fields('1,"the ""old"" mill"'), ["1", 'the "old" mill'])

    def test_a_field_that_is_one_quote(self):
        self.assertEqual(fields('"""",x'), ['"', "x"])

    def test_empty_fields_stay(self):
        self.assertEqual(fields('a,,"",'), ["a", "", "", ""])

    def test_spaces_stay(self):
        self.assertEqual(fields('a , "b'.replace('"', "")), ["a ", " b"])

    def test_lines(self):
        self.assertEqual(addresses('"A, B",1\n\nC,2\n'), [["A, B", "1"], ["C", "2"]])

    def test_no_imports(self):
        self.assertNotIn("import", Path("addresses.py").read_text())
