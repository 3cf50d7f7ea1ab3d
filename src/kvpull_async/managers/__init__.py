"""The core's operations on caches, behind both managers' names. The managers differ in a table, not in code paths."""
