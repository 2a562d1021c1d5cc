import subprocess
import tempfile
import unittest
from pathlib import Path


class Backup(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.base = Path(directory.name)
        self.source = self.base / "the source"
        self.source.mkdir()

    def backup(self, *names, source="the source"):
        for name in names:
            (self.source / name).write_text(name)
        script = Path("backup.sh").resolve()
        command = ["sh", str(script), source, "a target"]
        return subprocess.run(command, cwd=self.base, capture_output=True, text=True, timeout=20)

    def copied(self):
        return sorted(path.name for path in (self.base / "a target").glob("*"))

    def test_spaces(self):
        done = self.backup("a b.txt", "c.txt", "d.md")
        self.assertEqual((done.returncode, done.stdout), (0, "copied: 2\n"))
        self.assertEqual(self.copied(), ["a b.txt", "c.txt"])

    def test_hyphens_and_other_characters(self):
        done = self.backup("-r.txt", "two\nlines.txt", "st*r.txt")
        self.assertEqual((done.returncode, done.stdout), (0, "copied: 3\n"))
        self.assertEqual(self.copied(), ["-r.txt", "st*r.txt", "two\nlines.txt"])

    def test_nothing_to_copy(self):
        done = self.backup("d.md")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "copied: 0\n", ""))

    def test_no_source(self):
        done = self.backup(source="elsewhere")
        self.assertEqual((done.returncode, done.stdout), (2, ""))

    def test_absolute_source(self):
        done = self.backup("a.txt", source=str(self.source))
        self.assertEqual((done.returncode, done.stdout), (0, "copied: 1\n"))
