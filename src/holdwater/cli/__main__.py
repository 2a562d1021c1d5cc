"""`python -m holdwater.cli`: the same as `holdwater`."""

import sys

from . import main

sys.exit(main())
