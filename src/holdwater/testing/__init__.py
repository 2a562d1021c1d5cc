"""The fakes and faults that we ship: a scripted model, and what tests of suites and agents need beside it."""
