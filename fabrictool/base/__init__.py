"""The ground floor: errors, units, clock, ids, logging and settings. Imports nothing of ours."""
