"""The planner's problems, ``planner/p*.py``, one table each: all of them, or those that are named."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "planner"


def main(names):
    """Prints the tables; 1 when one of them finds ours behind what it must not be behind."""
    failed = 0
    for path in sorted(FOLDER.glob("p*.py")):
        if names and path.stem not in names:
            continue
        spec = importlib.util.spec_from_file_location(f"bench_planner_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(f"\n{module.__doc__}", flush=True)
        failed |= module.main([])
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
