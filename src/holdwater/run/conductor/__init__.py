"""The conductor: takes samples from the suite, admits attempts, follows them and settles their verdicts."""
