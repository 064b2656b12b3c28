"""The embedded default engine: a small real inference engine on NumPy, written for step control."""
