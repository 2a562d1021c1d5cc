import unittest

from build import CycleError, order


def cycle_of(needs):
    try:
        order(needs)
    except CycleError as error:
        return error.cycle
    return None


class Order(unittest.TestCase):
    def test_needs_come_first(self):
        self.assertEqual(order({"app": ["lib"], "lib": ["base"]}), ["base", "lib", "app"])

    def test_two_may_need_the_same(self):
        needs = {"app": ["left", "right"], "left": ["base"], "right": ["base"]}
        self.assertEqual(order(needs), ["base", "left", "right", "app"])

    def test_two_in_a_cycle(self):
        self.assertEqual(cycle_of({"auth": ["users"], "users": ["auth"]}), ["auth", "users", "auth"])

    def test_one_that_needs_itself(self):
        self.assertEqual(cycle_of({"a": ["a"]}), ["a", "a"])

    def test_the_way_to_a_cycle_is_no_part_of_it(self):
        needs = {"app": ["x"], "x": ["y"], "y": ["z"], "z": ["x"]}
        self.assertEqual(cycle_of(needs), ["x", "y", "z", "x"])
