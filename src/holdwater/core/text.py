"""Text from users as it can be written down: every message, verdict and row goes through here.

Pure. The records that carry such text are encoded in `ledger/text.py`.
"""

from __future__ import annotations

from .masking import mask_text

LONGEST_TEXT = 1024 * 1024  # characters


def clean_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """`text` without keys, and with escapes for what UTF-8 cannot say; beyond `longest` its middle is cut."""
    text = mask_text(text)
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}\n[cut: {len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
