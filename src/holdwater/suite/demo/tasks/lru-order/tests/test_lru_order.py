import unittest

from cache import Cache


def filled(size, *keys):
    cache = Cache(size)
    for key in keys:
        cache.put(key, key.upper())
    return cache


class Lru(unittest.TestCase):
    def test_the_size_holds(self):
        self.assertEqual(len(filled(2, "a", "b", "c")), 2)

    def test_the_oldest_goes(self):
        self.assertIsNone(filled(2, "a", "b", "c").peek("a"))

    def test_reading_counts(self):
        cache = filled(2, "a", "b")
        self.assertEqual(cache.get("a"), "A")
        cache.put("c", "C")
        self.assertEqual([cache.peek(k) for k in "abc"], ["A", None, "C"])

    def test_putting_again_counts_and_evicts_nothing(self):
        cache = filled(2, "a", "b")
        cache.put("a", "new")
        self.assertEqual([cache.peek(k) for k in "ab"], ["new", "B"])
        cache.put("c", "C")
        self.assertEqual([cache.peek(k) for k in "abc"], ["new", None, "C"])

    def test_peeking_does_not_count(self):
        cache = filled(2, "a", "b")
        cache.peek("a")
        cache.put("c", "C")
        self.assertIsNone(cache.peek("a"))

    def test_a_value_of_none_is_a_value(self):
        cache = Cache(2)
        cache.put("a", None)
        self.assertIsNone(cache.get("a", "default"))
        self.assertEqual(cache.get("b", "default"), "default")
