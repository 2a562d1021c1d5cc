"""Reads address lists: lines of fields, separated by commas."""


def fields(line):
    """The fields of a line."""
    return [field.strip('"') for field in line.split(",")]


def addresses(text):
    """A list of fields for each line that is not blank."""
    return [fields(line) for line in text.splitlines() if line.strip()]
