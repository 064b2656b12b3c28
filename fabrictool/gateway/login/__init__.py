"""Signing in with a browser, at an OpenID Connect provider, to make API keys of one's own."""
