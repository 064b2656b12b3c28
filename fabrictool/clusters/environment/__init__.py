"""The agents' Python environment on a site: what is in it, where that comes from, and how it gets there."""
