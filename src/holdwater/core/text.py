"""Cleans text from users for storage: every message, verdict and row passes through here.

Pure. `ledger/record_encoding.py` encodes the records that carry such text.
"""

from __future__ import annotations

from .masking import mask_text

LONGEST_TEXT = 1024 * 1024  # characters


def clean_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return `text` with keys masked and text that UTF-8 cannot encode escaped.

    A text of more than `longest` characters loses its middle.
    """
    text = mask_text(text)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n[cut: {len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
