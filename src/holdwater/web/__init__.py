"""What all servers of ours that speak HTTP share: which requests they obey, and the token that clients find.

`visitors.py` has the rules, `tokens.py` the token. Neither listens: a server's own room does that.
"""
