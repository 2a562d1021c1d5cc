"""Registries: how they are spoken to, and the engine that makes images inside one."""
