"""The conductor's part of remote sandboxes: the kind, and the places that attempts hold on the server."""
