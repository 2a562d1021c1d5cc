import unittest

from notes import Note, tagged


class Notes(unittest.TestCase):
    def test_a_new_note_has_no_tags(self):
        Note("a").tag("red")
        self.assertEqual(Note("b").tags, [])

    def test_a_new_note_has_no_links(self):
        Note("a").link("home", "/")
        self.assertEqual(Note("b").links, {})

    def test_notes_made_together_are_independent(self):
        first, second = tagged(["a", "b"], ["new"])
        first.tag("red")
        self.assertEqual(second.tags, ["new"])

    def test_what_was_given_is_left_alone(self):
        given = ["new"]
        Note("a", given).tag("red")
        self.assertEqual(given, ["new"])

    def test_tags_and_links_are_kept(self):
        note = Note("a", ["x"], {"home": "/"})
        note.tag("y")
        note.tag("y")
        note.link("up", "..")
        self.assertEqual(note.tags, ["x", "y"])
        self.assertEqual(note.links, {"home": "/", "up": ".."})
