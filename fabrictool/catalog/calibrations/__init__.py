"""Calibrations: efficiencies fitted from measurements, one file for a device and an engine."""

from importlib.resources import files


def texts() -> dict[str, str]:
    """File name without its ending → TOML text, in order of names."""
    entries = (entry for entry in files(__name__).iterdir() if entry.name.endswith(".toml"))
    return {entry.name[: -len(".toml")]: entry.read_text("utf-8") for entry in sorted(entries, key=lambda e: e.name)}
