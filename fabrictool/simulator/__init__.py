"""Operator costs and serving forecasts; pure. This first form is a roofline with a queue on top."""
