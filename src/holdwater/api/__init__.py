"""The command's functions as typed calls: `runs`, `reading`, `checking`, `grading`, `images`, `serving`...

The package itself imports nothing, so that `holdwater --help` is instant. `cli` uses these modules alone.
"""
