"""Harbor tasks as a suite: `suite.py` puts it together, `records.py` is the format, `stages.py` what follows
from it, `grading.py` what is done with a sandbox."""

from .suite import harbor

__all__ = ["harbor"]
