"""``make bench``: runs every benchmark of this folder, or those that are named, and prints their tables."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(names):
    """Each benchmark is a module with a `main(argv)`."""
    found = {p.stem: p for p in sorted(HERE.glob("*.py")) if p.stem != "run" and "\ndef main(" in p.read_text()}
    unknown = [name for name in names if name not in found]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(found)}", file=sys.stderr)
        return 64
    for name, path in found.items():
        if names and name not in names:
            continue
        print(f"\n== {name} ==", flush=True)
        spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main([])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
