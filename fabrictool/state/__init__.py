"""What the operator's side remembers of a fabric: its state, its trust material, the tenants' keys, its evidence."""
