"""The engine that builds images with a docker daemon, and the janitor that cleans up behind it."""
