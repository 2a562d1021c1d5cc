"""The life of one attempt, and the process that hosts many of them."""
