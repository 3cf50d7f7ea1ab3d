"""Where caches live. `base` is the contract, `host` is ordinary memory."""
