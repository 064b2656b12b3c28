"""Arrivals, length distributions, trace import and statistics of what users ask for."""
