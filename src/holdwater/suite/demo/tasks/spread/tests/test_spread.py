import tempfile
import tracemalloc
import unittest
from pathlib import Path

from figures import from_file, summary


class Summary(unittest.TestCase):
    def test_a_list(self):
        self.assertEqual(summary([1.0, 3.0]), {"count": 2, "mean": 2.0, "spread": 1.0, "largest": 3.0})

    def test_a_generator(self):
        self.assertEqual(summary(float(n) for n in (1, 3)), summary([1.0, 3.0]))

    def test_negative_values(self):
        self.assertEqual(summary(iter([-5.0, -3.0]))["largest"], -3.0)

    def test_no_values(self):
        with self.assertRaises(ValueError):
            summary(iter([]))

    def test_large_values_with_a_small_spread(self):
        found = summary(1e9 + n for n in (4.0, 7.0, 13.0, 16.0))
        self.assertAlmostEqual(found["mean"], 1e9 + 10, places=5)
        self.assertAlmostEqual(found["spread"], 22.5**0.5, places=5)

    def test_a_long_series_is_not_kept(self):
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        self.assertEqual(summary(float(n) for n in range(100_000))["count"], 100_000)
        self.assertLess(tracemalloc.get_traced_memory()[1], 500_000)

    def test_a_file(self):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "values"
            path.write_text("1.0\n\n3.0\n")
            self.assertEqual(from_file(path)["spread"], 1.0)
