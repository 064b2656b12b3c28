"""Fits the catalogue's calibrations of servers under load from the measured slice: run this file (ten minutes).

What the catalogue ships (`hierarchy`): what all pairs of device and engine share, what makers and engines do, and a
pair by itself where models that were left out come out better with it. Bands come from rows, models and devices that a
fit has not seen. Static batches have a script of their own (`calibrate_static`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import hierarchy
from measured import load

from fabrictool.catalog import calibrations as catalogue
from fabrictool.simulator import fitting
from fabrictool.simulator.calibration import ANY, Calibration, dumps, of_vendor

OUT = Path(catalogue.__file__).parent
LEAST = 20
"""Rows of a pair that gets a file of its own."""
KEPT = "rtxpro6000-vllm-online.toml"
"""Fitted from kernels by `operator_calibration`."""
SOURCE = "ai-dynamo/aiconfigurator 095f58a, silicon_sample.csv (InferenceX and NVIDIA runs of 2025-10 to 2026-04)"


def main():
    """Writes the files anew."""
    rows = [o for o in load("silicon") if o.case.mode == "agg"]
    write(rows, hierarchy.blind(rows, log=lambda line: print(line, flush=True)))


def write(rows, blind):
    """One file for all, for each maker and engine, and for each pair that deserves it."""
    for old in OUT.glob("*-online.toml"):
        if old.name != KEPT:
            old.unlink()
    engines = (ANY, *sorted({o.case.engine for o in rows}))
    places = (ANY, *sorted({of_vendor(o.case.device.vendor) for o in rows}))
    for place in places:
        for engine in engines:
            mine = [
                i
                for i, o in enumerate(rows)
                if engine in (ANY, o.case.engine) and place in (ANY, of_vendor(o.case.device.vendor))
            ]
            unseen = {"unseen": blind.model_shared, "elsewhere": blind.device}
            _write(place, engine, rows, mine, blind, unseen)
    for device, engine in sorted(blind.own):
        mine = [i for i, o in enumerate(rows) if (o.case.device.id, o.case.engine) == (device, engine)]
        if len(mine) >= LEAST:
            _write(device, engine, rows, mine, blind, {"unseen": blind.model_own})


# Wide: what a file is of, what it was fitted to, and what each of its bands is made from.
def _write(place, engine, rows, mine, blind, bands):
    one = Calibration(
        device=place,
        engine=engine,
        scope="online",
        factors=blind.whole.shipped(place, engine, own="elsewhere" not in bands),
        spreads=fitting.spreads([blind.shape[i] for i in mine if i in blind.shape]),
        hull=fitting.hull([rows[i] for i in mine]),
        points=len(mine),
        version="2",
        source=SOURCE,
        **{
            name: hierarchy.model_bands(rows, errors, mine, list(errors))
            if name == "unseen"
            else fitting.spreads([errors[i] for i in mine])
            for name, errors in bands.items()
        },
    )
    save(one)


def save(one):
    """In the catalogue, under the name that says what it is of."""
    name = "-".join(part.replace("*", "any").replace("/", "-") for part in (one.device, one.engine, one.scope))
    (OUT / f"{name}.toml").write_text(dumps(one))
    print("wrote", name, one.points, flush=True)


if __name__ == "__main__":
    main()
