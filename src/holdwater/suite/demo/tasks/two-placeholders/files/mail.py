"""Fills in the text of a mail."""

import re


def fill(text, values):
    """`text` with every `{{name}}` replaced by its value."""
    for name in re.findall(r"{{(.*)}}", text):
        text = re.sub("{{" + name + "}}", str(values.get(name, "")), text)
    return text
