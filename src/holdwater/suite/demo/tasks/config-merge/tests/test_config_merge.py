import copy
import json
import unittest
from pathlib import Path

from settings import load, merge

DEFAULTS = {"editor": {"theme": "light", "font": {"name": "Mono", "size": 12}, "rulers": [80, 100]}, "autosave": True}


class Merge(unittest.TestCase):
    def setUp(self):
        self.defaults = copy.deepcopy(DEFAULTS)

    def test_every_depth(self):
        merged = merge(self.defaults, {"editor": {"font": {"size": 14}}})
        self.assertEqual(merged["editor"]["font"], {"name": "Mono", "size": 14})
        self.assertEqual(merged["editor"]["theme"], "light")

    def test_lists_are_replaced(self):
        self.assertEqual(merge(self.defaults, {"editor": {"rulers": [120]}})["editor"]["rulers"], [120])

    def test_null_takes_away(self):
        merged = merge(self.defaults, {"autosave": None, "editor": {"theme": None}, "absent": None})
        self.assertNotIn("autosave", merged)
        self.assertNotIn("theme", merged["editor"])
        self.assertNotIn("absent", merged)

    def test_null_inside_something_new(self):
        self.assertEqual(merge({}, {"a": {"b": None, "c": 1}}), {"a": {"c": 1}})

    def test_an_object_over_a_value_and_a_value_over_an_object(self):
        merged = merge(self.defaults, {"autosave": {"every": 5}, "editor": False})
        self.assertEqual(merged, {"autosave": {"every": 5}, "editor": False})

    def test_the_inputs_stay(self):
        user = {"editor": {"rulers": [120], "font": {"size": 14}}}
        before = copy.deepcopy(user)
        merged = merge(self.defaults, user)
        merged["editor"]["rulers"].append(1)
        merged["editor"]["font"]["size"] = 99
        self.assertEqual((self.defaults, user), (DEFAULTS, before))

    def test_untouched_defaults_are_no_part_of_the_result(self):
        merge(self.defaults, {})["editor"]["rulers"].append(1)
        self.assertEqual(self.defaults, DEFAULTS)

    def test_load(self):
        self.assertEqual(load(), json.loads(Path("defaults.json").read_text()))
