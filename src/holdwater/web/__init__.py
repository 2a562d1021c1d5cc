"""Code that all our HTTP servers share: the rules for accepting requests, and the token that clients find.

`request_rules.py` has the rules, `tokens.py` the token, `message_link.py` and `link_streams.py` the link of a
run with a sandbox server. None of them listens: each server does so in its own package.
"""
