import json
import subprocess
import sys
import unittest

from convert import options


class Options(unittest.TestCase):
    def test_defaults(self):
        found = vars(options(["a.png"]))
        self.assertEqual(found, {"source": "a.png", "cache": True, "verbose": 0, "scale": 1, "tag": []})

    def test_cache(self):
        for word, on in [("no", False), ("FALSE", False), ("off", False), ("0", False), ("Yes", True), ("1", True)]:
            self.assertIs(options(["a", "--cache", word]).cache, on)

    def test_verbosity_adds_up(self):
        self.assertEqual(options(["a", "-v", "-v"]).verbose, 2)
        self.assertEqual(options(["a", "-vvv"]).verbose, 3)

    def test_scale(self):
        self.assertEqual(options(["a", "--scale", "-1.5"]).scale, -1.5)

    def test_tags_are_collected_and_not_shared(self):
        self.assertEqual(options(["a", "--tag", "x", "--tag", "y"]).tag, ["x", "y"])
        self.assertEqual(options(["a"]).tag, [])

    def test_anything_else_is_a_usage_error(self):
        command = [sys.executable, "convert.py", "a", "--cache", "perhaps"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("usage:", done.stderr)

    def test_as_a_program(self):
        command = [sys.executable, "convert.py", "a", "--cache", "off", "--tag", "x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        self.assertEqual(json.loads(done.stdout)["cache"], False)
