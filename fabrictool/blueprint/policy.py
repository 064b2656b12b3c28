"""A policy file → checked rules, with the place of each limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint.complaints import problems_of
from fabrictool.blueprint.reader import read
from fabrictool.domain.policy import ReviewPolicy

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from fabrictool.base.errors import Place
    from fabrictool.blueprint.tree import YamlNode


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Rules and where they were written."""

    policy: ReviewPolicy
    tree: YamlNode

    def place(self, index: int, effect: Literal["deny", "warn"], limit: str) -> Place:
        node, _ = self.tree.nearest(("rules", index, effect, limit))
        return node.key_place(f"rules[{index}].{effect}.{limit}")


def load_policy(path: Path) -> LoadedPolicy:
    """Read and check; raises InvalidInputError with all problems and their places."""
    tree = read(path, os.path.normpath(path))
    try:
        return LoadedPolicy(ReviewPolicy.model_validate(tree.data()), tree)
    except ValidationError as error:
        raise InvalidInputError(problems_of(error, tree, ReviewPolicy)) from error
