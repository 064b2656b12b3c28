"""Carries a plan out: journalled, resumable, one writer at a time."""
