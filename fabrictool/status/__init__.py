"""The versioned read-only documents that agents and gateways publish, and the client that reads them."""
