"""How bytes travel. `base` is the contract; each other module is one way, chosen per link by capability."""
