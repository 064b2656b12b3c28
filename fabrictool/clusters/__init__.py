"""Facts in, commands out: the clusters of the inventory, each kind behind one protocol."""
