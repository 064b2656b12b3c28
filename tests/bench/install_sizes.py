"""Installed size of each extra: the files of every distribution that it brings, as recorded by their installers."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.test_install import closure


def octets(name):
    """Size of a distribution's files, byte code left out."""
    files = metadata.distribution(name).files or []
    return sum(
        Path(str(f.locate())).stat().st_size for f in files if f.suffix != ".pyc" and Path(str(f.locate())).is_file()
    )


def main(_argv=None):
    """Print the table."""
    own = sum(
        p.stat().st_size
        for p in (Path(__file__).parents[2] / "fabrictool").rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    )
    print(f"fabrictool itself {own / 1e6:.1f} MB")
    for extra in ("agent", "gateway", "reference", "tui"):
        names = closure(extra)
        sizes = sorted(((octets(n), n) for n in names), reverse=True)
        largest = ", ".join(f"{n} {s / 1e6:.1f}" for s, n in sizes[:3])
        print(f"{extra:<10} {len(names):>3} packages  {sum(s for s, _ in sizes) / 1e6:7.1f} MB  (largest: {largest})")


if __name__ == "__main__":
    main()
