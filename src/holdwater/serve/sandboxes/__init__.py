"""The sandbox server: sandboxes of this machine for other machines. Start with `sandbox_server.py`."""
