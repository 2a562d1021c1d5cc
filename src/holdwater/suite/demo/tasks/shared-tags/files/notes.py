"""Notes with tags."""


class Note:
    def __init__(self, text, tags=[], links={}):
        self.text = text
        self.tags = tags
        self.links = links

    def tag(self, name):
        if name not in self.tags:
            self.tags.append(name)

    def link(self, name, target):
        self.links[name] = target


def tagged(texts, tags):
    """A note for each text, all with the same tags to begin with."""
    return [Note(text, tags) for text in texts]
