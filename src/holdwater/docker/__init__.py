"""A small async client of the docker engine's API, and its command for builds. It makes no decisions."""
