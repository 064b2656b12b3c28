"""Operator costs, calibrations with their error bands, and discrete-event serving; pure."""
