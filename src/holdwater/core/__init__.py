"""The records, the errors and the decisions. Pure: nothing here does I/O, reads a clock or waits."""
