"""What people look at: the live display and the report. Reads the ledger, nothing else."""
