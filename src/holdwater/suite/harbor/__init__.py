"""Harbor tasks as a suite.

`suite.py` makes the suite, `records.py` defines the format, `stages.py` derives the stages of a task, and
`grading.py` runs a stage in a sandbox.
"""

from .suite import harbor

__all__ = ["harbor"]
