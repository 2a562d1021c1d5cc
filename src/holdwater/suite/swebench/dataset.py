"""Rows of a dataset by its name, through the `datasets` package in a process of its own.

The package takes more memory than a conductor, and it needs the user's environment: the place of its cache, a
proxy, a token. `dataset_reader.py` is that process. Rows come one at a time.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from ...core.errors import BadInput
from ...core.records import Record
from ...dialect import list_key_variables

READER = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("dataset_reader.py"))]
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
FILE_KINDS = (".jsonl", ".json", ".parquet")
LONGEST_REASON = 1000


class DatasetSource(Record, frozen=True):
    """A dataset on the Hugging Face hub, or in its cache."""

    name: str
    revision: str | None = None
    split: str = "test"
    subset: str | None = None

    @property
    def place(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}{revision} ({self.split})"


class DatasetProblem(Record, frozen=True):
    """The reason that a reader gives for its failure."""

    message: str
    hint: str = ""


def find_dataset(path: str) -> tuple[str, str | None] | None:
    """Return name and revision if a spec's path names a dataset; a file of that path takes precedence."""
    match = NAME.fullmatch(path)
    if match is None or path.endswith(FILE_KINDS) or Path(path).exists():
        return None
    return match["name"], match["revision"]


def read_dataset(source: DatasetSource, columns: Sequence[str]) -> Iterator[bytes]:
    """Yield each row as JSON; raise BadInput with the package's reason if there are none to be had."""
    request = msgspec.json.encode({**msgspec.structs.asdict(source), "columns": columns})
    withheld = [f"--unset={name}" for name in list_key_variables()]
    with TemporaryFile() as asked, TemporaryFile() as said:
        asked.write(request)
        asked.seek(0)
        with subprocess.Popen(
            ["env", *withheld, *READER], stdin=asked, stdout=subprocess.PIPE, stderr=said
        ) as process:
            assert process.stdout is not None
            try:
                yield from process.stdout
            finally:
                process.stdout.close()
                if process.poll() is None:
                    process.terminate()
        if process.wait() > 0:
            said.seek(0)
            raise _explain(source, said.read())


def _explain(source: DatasetSource, said: bytes) -> BadInput:
    last = said.strip().rpartition(b"\n")[2]
    try:
        problem = msgspec.json.decode(last, type=DatasetProblem)
    except msgspec.MsgspecError:  # the package has ended the process
        reason = last.decode(errors="replace")[-LONGEST_REASON:]
        return BadInput(f"cannot load the dataset `{source.place}`: {reason or 'no reason given'}")
    return BadInput(f"cannot load the dataset `{source.place}`: {problem.message}", problem.hint)
