"""Declarative, coordinator-free LLM serving on a federation of batch-scheduled clusters."""

__version__ = "0.1.0"
