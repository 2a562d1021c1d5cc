"""Records, errors and decisions. Pure: no module here does I/O, reads a clock or waits."""
