"""A tokenizer of a few words with the methods of transformers' tokenizers.

A text has several encodings (`ab` is one token, or `a` and `b`), so that a sampled reply can come back in
other tokens.
"""

from __future__ import annotations

import re
from typing import Any

import jinja2

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class SmallTokenizer:
    """Tokens are the special ones, `ab`, and single characters."""

    eos_token = "<end>"

    def __init__(self, template: str = TEMPLATE) -> None:
        self._template = jinja2.Template(template)
        self._special = ["<end>", "<user>", "<assistant>", "<tool>", "<system>"]
        self._words = [*self._special, "ab", *map(chr, range(10, 127))]
        self._ids = {word: number for number, word in enumerate(self._words)}
        self._pattern = re.compile("|".join([*self._special, "ab", "."]), re.DOTALL)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        assert options.pop("tokenize") is False
        return self._template.render(messages=conversation, **options)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self._ids[word] for word in self._pattern.findall(text)]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        words = [self._words[token] for token in token_ids]
        return "".join(word for word in words if not (skip_special_tokens and word in self._special))

    def spell(self, *words: str) -> list[int]:
        """Return the ids of these words, one each."""
        return [self._ids[word] for word in words]
