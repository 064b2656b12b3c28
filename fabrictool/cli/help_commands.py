"""``explain``, ``doctor`` and ``version``."""

from __future__ import annotations

from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("explain")(explain)
    app.command("doctor")(doctor)
    app.command("version")(version)


def explain(
    code: Annotated[str, typer.Argument(help="An error code such as FT1203.")], as_json: JsonOption = False
) -> None:
    """Say what an error code means and what to do; works offline."""
    import difflib

    from fabrictool.base.errors import UsageError
    from fabrictool.catalog.errors import error_codes
    from fabrictool.cli.output import data, json_data, paint

    codes = error_codes()
    entry = codes.get(code.upper())
    if entry is None:
        near = difflib.get_close_matches(code.upper(), codes, 3) or ["docs/reference/errors.md lists all"]
        raise UsageError.of("FT9003", f"there is no error code {code!r}", hint=f"nearest: {', '.join(near)}")
    if as_json:
        json_data({"format_version": "1", "type": "explanation", "code": code.upper(), **_plain(entry)})
        return
    data(f"{paint(code.upper(), 'bold')}  {entry.title}\n\n{entry.text}\n\nWhat to do: {entry.hint}")


def doctor(blueprint: BlueprintOption = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> int:
    """Check this machine and the fabric: versions, folders, trust, ports, models, engines, clusters."""
    from fabrictool.cli.checkup import run_checks
    from fabrictool.cli.output import data, json_data, paint

    checks = run_checks(blueprint, inventory)
    if as_json:
        rows = [{"name": c.name, "good": c.good, "text": c.text, "hint": c.hint} for c in checks]
        json_data({"format_version": "1", "type": "checks", "checks": rows})
    else:
        for check in checks:
            mark = paint("ok  ", "good") if check.good else paint("FAIL", "error")
            data(f"{mark}  {check.name:<22} {check.text}" + (f"\n      hint: {check.hint}" if not check.good else ""))
    return 0 if all(check.good for check in checks) else 1


def version() -> None:
    """Print the version."""
    from fabrictool import __version__
    from fabrictool.cli.output import data

    data(__version__)


def _plain(entry: object) -> dict[str, str]:
    return {name: str(getattr(entry, name)) for name in ("title", "text", "hint")}
