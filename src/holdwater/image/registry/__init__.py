"""The registry client, and the engine that assembles images inside a registry."""
