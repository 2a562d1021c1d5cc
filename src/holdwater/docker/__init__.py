"""A small async client of the docker engine's API. It decides nothing."""
