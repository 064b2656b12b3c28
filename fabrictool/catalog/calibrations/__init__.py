"""Calibrations: efficiencies fitted from measurements, one file for a device and an engine."""

from importlib.resources import files


def texts() -> dict[str, str]:
    """File name without its ending → TOML text, in order of names."""
    found = (entry for entry in files(__name__).iterdir() if entry.name.endswith(".toml"))
    return {entry.name[: -len(".toml")]: entry.read_text("utf-8") for entry in sorted(found, key=lambda e: e.name)}
