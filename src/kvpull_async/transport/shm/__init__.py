"""Shared memory between processes of one host: a pull costs one copy, made by the side that pulls."""
