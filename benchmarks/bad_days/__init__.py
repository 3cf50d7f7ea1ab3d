"""What `chaos.py`, `soak.py` and `floods.py` are made of. It must not be run by itself."""
