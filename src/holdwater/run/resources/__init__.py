"""Memory, CPU, disk and model budgets of a run: the governor, and the watches that feed it."""
