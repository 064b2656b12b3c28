"""Parses arguments, calls one function, prints; decides nothing."""
