"""Test support for suites and agents: a scripted model, fault injection, leak checks and fakes."""
