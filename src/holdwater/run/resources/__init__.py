"""Disk and model budgets of a run, and the retention of its files. `governor/` has memory and CPU."""
