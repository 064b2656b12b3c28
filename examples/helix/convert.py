"""Makes the other files of this folder from those of Helix's artifact: ``convert.py CLUSTER MACHINES LAYOUT``."""

import sys
from pathlib import Path

import yaml
from instance import documents, read_cluster, read_layout, read_profiles

from fabrictool.base.errors import FabrictoolError

HERE = Path(__file__).parent
ABOUT = {
    "blueprint.yaml": "LLaMA-70B under the requests of Helix's paper, asked for more than its 24 GPUs can serve.",
    "inventory.yaml": "Helix's 24 GPUs in three regions; see README.md for what was changed. Made by convert.py.",
    "layers.yaml": "Helix's own layout: first and last layer of each node, by cluster. Made by convert.py.",
}


def main(paths, folder=HERE):
    """Returns the exit code."""
    if len(paths) != 3:
        print(__doc__, file=sys.stderr)
        return 64
    texts = [(path, Path(path).read_text(encoding="utf-8")) for path in paths]
    try:
        cluster = read_cluster(*texts[0])
        made = documents(cluster, read_profiles(*texts[1]), read_layout(*texts[2], cluster))
    except FabrictoolError as error:
        print("\n".join(problem.render() for problem in error.problems), file=sys.stderr)
        return error.exit_code
    for (name, about), document in zip(ABOUT.items(), (made.blueprint, made.inventory, made.layers), strict=True):
        text = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None)
        (folder / name).write_text(f"# {about}\n{text}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
