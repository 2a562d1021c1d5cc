"""The languages that clients speak. Each knows its paths, errors and streams, and where usage stands."""
