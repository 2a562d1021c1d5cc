import unittest

from pager import page, page_count


class Pager(unittest.TestCase):
    def test_a_remainder_needs_a_page(self):
        self.assertEqual(page_count(21, 10), 3)

    def test_full_pages_need_no_more(self):
        self.assertEqual(page_count(20, 10), 2)

    def test_nothing_needs_no_page(self):
        self.assertEqual(page_count(0, 10), 0)

    def test_pages_hold_everything_once_and_in_order(self):
        items = list(range(21))
        pages = [page(items, n, 10) for n in (1, 2, 3)]
        self.assertEqual([i for p in pages for i in p], items)
        self.assertEqual([len(p) for p in pages], [10, 10, 1])

    def test_pages_that_do_not_exist_are_empty(self):
        self.assertEqual(page([1, 2, 3], 2, 10), [])
        self.assertEqual(page([1, 2, 3], 0, 2), [])
