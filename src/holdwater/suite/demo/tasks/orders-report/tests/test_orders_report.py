import sqlite3
import unittest
from pathlib import Path

from report import report


class Report(unittest.TestCase):
    def setUp(self):
        self.db = sqlite3.connect(":memory:")
        self.addCleanup(self.db.close)
        self.db.executescript(Path("schema.sql").read_text())
        names = ["Ada", "O'Brien", "Zoe", "Ben"]
        self.db.executemany("INSERT INTO customers (name) VALUES (?)", [(n,) for n in names])
        orders = [(1, 500), (1, 500), (2, 3000), (3, 1000)]
        self.db.executemany("INSERT INTO orders (customer, cents) VALUES (?, ?)", orders)
        notes = [(1, "a"), (1, "b"), (1, "c"), (4, "d")]
        self.db.executemany("INSERT INTO notes (customer, text) VALUES (?, ?)", notes)

    def test_all(self):
        expected = [("O'Brien", 1, 3000, 0), ("Ada", 2, 1000, 3), ("Zoe", 1, 1000, 0), ("Ben", 0, 0, 1)]
        self.assertEqual(report(self.db), expected)

    def test_one(self):
        self.assertEqual(report(self.db, "O'Brien"), [("O'Brien", 1, 3000, 0)])

    def test_nobody(self):
        self.assertEqual(report(self.db, "Nobody"), [])

    def test_an_empty_name_is_a_name(self):
        self.assertEqual(report(self.db, ""), [])

    def test_two_of_a_name(self):
        self.db.execute("INSERT INTO customers (name) VALUES ('Zoe')")
        self.assertEqual(report(self.db, "Zoe"), [("Zoe", 1, 1000, 0), ("Zoe", 0, 0, 0)])
