"""Code that all our HTTP servers share: the rules for accepting requests, and the token that clients find.

`request_rules.py` has the rules, `tokens.py` the token. Neither listens: each server does so in its own
package.
"""
