"""Parts of the memory on Ascend devices: what each says of itself stands in its module; this only groups them."""
