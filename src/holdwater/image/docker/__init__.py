"""The engine that builds images with a docker daemon, and the janitor that removes its leftovers."""
