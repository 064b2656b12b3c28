"""The OpenAI-compatible ingress: an agent with a public face."""
