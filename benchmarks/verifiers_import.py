"""What a worker pays for tasksets of verifiers: memory and CPU time of the package's import.

Run it with a Python that has the package: `python benchmarks/verifiers_import.py`.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

MiB = 1024 * 1024


def read_memory() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / MiB


def main() -> None:
    before, begun = read_memory(), time.process_time()
    importlib.import_module("verifiers.v1")
    print(f"memory: {read_memory() - before:.0f} MiB, CPU time: {time.process_time() - begun:.1f} s")


if __name__ == "__main__":
    main()
