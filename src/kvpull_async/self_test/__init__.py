"""`python -m kvpull_async.self_test`: whether this machine's NPU does what the library takes for granted.

Its report fits an issue. It is a program, and nothing of the library may import it.
"""
