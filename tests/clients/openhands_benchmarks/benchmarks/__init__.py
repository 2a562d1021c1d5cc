"""A stand-in for the package `benchmarks` of OpenHands, which PyPI does not have: its interface alone."""
