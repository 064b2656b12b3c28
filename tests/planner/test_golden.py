"""The rows that each rule makes, as text beside this test: one tiny fabric and one file of ``golden/`` for each rule.

``GOLDEN=write`` in the environment writes the files anew, for a change that is meant; read the difference before it is
committed.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Level, ModelNeed, Option
from tests.planner.test_exact import figures, option, pool, problem
from tests.planner.test_phases import between, phase

GOLDEN = Path(__file__).parent / "golden"
TWO = (Level(0.5, 0.5, attains=True), Level(0.8, 1.0, attains=False))
"""One replica at two loads: 0.5 and 0.8 requests/s."""
A, B = pool("a"), pool("b", price=2.0)


def one(need, **changes):
    """One model on one pool of two nodes with one device."""
    return replace(problem([need], [option("m", A, levels=TWO)], [A], objective=("slo", "latency", "cost")), **changes)


def two(need, **changes):
    """One model on two pools at two sites."""
    options = [option("m", A), option("m", B)]
    return replace(problem([need], options, [A, B], objective=("latency", "cost")), **changes)


def sized():
    """Replicas of 1, 2 and 4 devices on three nodes of 4, and a pipeline of two stages."""
    where = pool("a", nodes=3, per_node=4)
    options = [option(f"m{tp}", where, tp=tp) for tp in (1, 2, 4)]
    options.append(Option("long", where, 2, figures(1.0), (Level(0.8, 0.8, attains=True),), pp=2))
    return problem([ModelNeed(o.model, 1.0, 0, 12) for o in options], options, [where])


def apart():
    """Prefill and decode, which may share a pool or use the link between two sites."""
    options = [phase("prefill", "m", A), phase("prefill", "m", B), phase("decode", "m", B)]
    transfers = between("m", A, B, link=("a", "b"), octets=2e6) | between("m", B, B, seconds=0.01)
    return replace(problem([ModelNeed("m", 1.0, 0, 4)], options, [A, B]), transfers=transfers, links={("a", "b"): 3e6})


def keys(instance):
    return [o.key for o in instance.options]


PLAIN = ModelNeed("m", 1.0, 0, 4)
CASES = {
    "demand": (one(PLAIN), "served"),
    "slo": (one(PLAIN), "slo"),
    "latency": (one(PLAIN), "latency"),
    "cost": (two(PLAIN), "cost"),
    "devices_and_whole_nodes": (sized(), "served"),
    "minimum": (
        two(ModelNeed("m", 1.0, 2, 4), options=(option("m", A), option("m", replace(B, stable=False)))),
        "served",
    ),
    "outages": (two(ModelNeed("m", 1.0, 2, 4), outages=(frozenset({A.key}), frozenset({B.key}))), "served"),
    "maximum": (two(ModelNeed("m", 1.0, 0, 3)), "served"),
    "pins": (two(ModelNeed("m", 1.0, 0, 4, pins={("b", ""): 2})), "served"),
    "spread": (two(ModelNeed("m", 1.0, 2, 4, spread_sites=True)), "served"),
    "fixed": (two(PLAIN, fixed={keys(two(PLAIN))[1]: 2}), "served"),
    "moves": (two(PLAIN, current={keys(two(PLAIN))[0]: 2}), "moves"),
    "phases_and_links": (apart(), "latency"),
}


def names(formulation):
    """Column → what it is."""
    found = {}
    for i in formulation.chosen:
        chosen = formulation.problem.options[i]
        parts = [chosen.model, chosen.pool.cluster, f"tp{chosen.tp}"]
        parts += [f"pp{chosen.pp}"] if chosen.pp > 1 else []
        parts += [chosen.phase] if chosen.phase != "unified" else []
        name = "_".join(parts)
        found[formulation._idle[i]] = f"idle_{name}"
        found |= {column: f"at{level + 1}_{name}" for level, column in enumerate(formulation._levels[i])}
        if i in formulation._count:
            found[formulation._count[i]] = f"replicas_{name}"
    found |= {column: f"unserved_{model}" for model, column in formulation._unserved.items()}
    found |= {column: f"handed_{m}_{a[0]}_{b[0]}" for (m, a, b), column in formulation._handed.items()}
    return found


def program_text(formulation, stage):
    """In the LP format, as far as these programs need it."""
    model = formulation.program._model
    known = names(formulation)
    columns = [known.get(c, f"move{c}") for c in range(model.num_variables())]

    def total(terms):
        return " ".join(f"{'-' if w < 0 else '+'} {abs(w):.10g} {columns[c]}" for c, w in sorted(terms)) or "0"

    lines = ["Minimize", f" {stage}: {total(formulation.terms(stage))}", "Subject To"]
    for row in range(model.num_constraints()):
        terms = zip(model.constraint_var_indices(row), model.constraint_coefficients(row), strict=True)
        low, high, text = model.constraint_lower_bound(row), model.constraint_upper_bound(row), total(terms)
        if low == high:
            lines.append(f" {text} = {low:.10g}")
        else:
            lines += [f" {text} >= {low:.10g}"] if low > -math.inf else []
            lines += [f" {text} <= {high:.10g}"] if high < math.inf else []
    lines.append("Bounds")
    for c, name in enumerate(columns):
        lines.append(f" {model.var_lower_bound(c):.10g} <= {name} <= {model.var_upper_bound(c):.10g}")
    lines.append("General")
    lines += [f" {name}" for c, name in enumerate(columns) if model.var_is_integral(c)]
    return "\n".join([*lines, "End", ""])


def compare(name, text):
    file = GOLDEN / f"{name}.lp"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_makes_just_these_rows(name):
    instance, stage = CASES[name]
    compare(name, program_text(Formulation(instance, range(len(instance.options)), whole=True), stage))


def test_a_kept_stage_is_a_row_more():
    instance = one(PLAIN)
    formulation = Formulation(instance, range(len(instance.options)), whole=True)
    formulation.keep("served", 0.25)
    compare("kept_stage", program_text(formulation, "latency"))


def test_the_relaxation_has_no_counts():
    instance = one(PLAIN)
    compare("relaxation", program_text(Formulation(instance, range(len(instance.options)), whole=False), "served"))


def test_every_file_has_its_rule():
    assert {file.stem for file in GOLDEN.iterdir()} == {*CASES, "kept_stage", "relaxation"}
