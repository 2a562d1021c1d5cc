"""Pages for people: the live display and the reports. This package reads only the ledger."""
