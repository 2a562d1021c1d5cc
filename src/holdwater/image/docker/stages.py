"""Read the stages and the arguments that a Dockerfile declares, and check a target against them. Pure.

`dockerfile.py` renders Dockerfiles.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

_NAMED = re.compile(r"FROM .* AS (\S+)$", re.IGNORECASE)
_HEREDOC = re.compile(r"(?<!<)<<-?([\"']?)([A-Za-z_]\w*)\1")  # neither `<<<word` nor `1 << 2`
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
# Arguments that BuildKit knows without a declaration.
_PREDEFINED = re.compile(
    r"(https?|ftp|no|all)_proxy|BUILDKIT_.*|SOURCE_DATE_EPOCH|(BUILD|TARGET)(PLATFORM|OS|ARCH|VARIANT)",
    re.IGNORECASE,
)


def list_stages(text: str) -> list[str]:
    """Return the stages of a Dockerfile: their names, or their numbers where they have none."""
    lines = [" ".join(line.split()) for line in read_instructions(text)]
    stages = [line for line in lines if line.upper().startswith("FROM ")]
    names = (_NAMED.match(stage) for stage in stages)
    return [name[1] if name else str(number) for number, name in enumerate(names)]


def find_wrong_target(text: str, target: str) -> str:
    """Return why a Dockerfile cannot be built up to this stage; empty: it can."""
    stages = [stage for stage in list_stages(text) if not stage.isdigit()]
    if not target or target.lower() in (stage.lower() for stage in stages):
        return ""
    known = (
        f"the stages are {', '.join(f'`{stage}`' for stage in stages)}" if stages else "no stage has a name"
    )
    return f"no such stage: `{target}`; {known}"


def find_unknown_argument(text: str, arguments: Iterable[str]) -> str:
    """Return the first argument that no `ARG` of the Dockerfile declares; empty: there is none."""
    declared = set(_list_arguments(text))
    return next((name for name in arguments if name not in declared and not _PREDEFINED.fullmatch(name)), "")


def read_instructions(text: str) -> Iterator[str]:
    """Yield the instructions of a Dockerfile, each with its continuation lines, without here-documents."""
    pending, ends = "", list[str]()
    for line in text.splitlines():
        if ends:
            if line.strip() == ends[0]:
                ends.pop(0)
            continue
        if line.lstrip().startswith("#"):
            continue
        pending += line
        if line.rstrip().endswith("\\"):
            pending += "\n"
            continue
        if pending.strip():
            yield pending.strip()
            if pending.split()[0].upper() in _WITH_HEREDOC:
                ends = [match[2] for match in _HEREDOC.finditer(pending)]
        pending = ""


def _list_arguments(text: str) -> Iterator[str]:
    for line in read_instructions(text):
        word, *more = line.replace("\\\n", " ").split(maxsplit=1)
        if word.upper() == "ARG" and more:
            yield from (part.partition("=")[0] for part in _split_words(more[0]))


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
