from __future__ import annotations

from fabrictool.base.errors import Place, Problem
from fabrictool.blueprint.report import to_github, to_json

PROBLEM = Problem(
    "FT1110",
    "slo: 100% wrong,\nreally",
    Place("a,b.yaml", 3, 5, "slo", "    800", 3),
    "write `800ms`",
    also=(Place("c.yaml", 1, 2),),
)


def test_github_annotations_escape_what_github_decodes():
    assert to_github([PROBLEM]) == (
        "::error file=a%2Cb.yaml,line=3,col=5,endColumn=8,title=FT1110::"
        "slo: 100%25 wrong,%0Areally%0Ahint: write `800ms`%0Asee also c.yaml:1:2"
    )


def test_github_without_a_file():
    assert to_github([Problem("FT1", "x", severity="warning")]) == "::warning title=FT1::x"


def test_json_holds_the_same():
    (found,) = to_json([PROBLEM])
    assert (found["code"], found["file"], found["line"], found["column"]) == ("FT1110", "a,b.yaml", 3, 5)
    assert found["also"] == ["c.yaml:1:2"]


def test_text_has_the_caret():
    assert "    3 |     800\n      |     ^^^" in PROBLEM.render()
