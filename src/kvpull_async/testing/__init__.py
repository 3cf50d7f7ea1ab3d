"""For authors of transports, data paths and memories: suites to inherit (`contracts`) and faults to inject (`faults`).
`proxy` harms the connections between two processes, whatever they are.

A suite is a pytest class: inherit it, say how to make what is to be tested, and run it with pytest-asyncio in its auto
mode. It must not be imported by the library itself.
"""
