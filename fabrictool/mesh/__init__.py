"""Membership, registry and identity: a sans-I/O core, with the transports that carry it beside it."""
