"""The version of holdwater; the package build reads it from here."""

__version__ = "0.1.0"
