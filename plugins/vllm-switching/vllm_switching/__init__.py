"""A vLLM whose workers compute each step together, or each its own requests, and change between the two live."""
