"""What models may use of a stage that is kept."""

import pytest

from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.solvers.shares import SLACK, KeptStage


def test_what_is_left_is_shared_out_by_what_models_do():
    kept = KeptStage.of("served", 12.0, {"a": 6.0, "b": 3.0, "c": 0.0})
    assert kept.shares == {"a": 8.0, "b": 4.0, "c": 0.0}
    assert KeptStage.of("served", 1.0, {"a": 0.0, "b": 0.0}).shares == {"a": 0.5, "b": 0.5}


def test_the_slack_of_one_is_not_taken_from_another():
    """A placement whose loads used the slack is still one of each of its parts: none can do with less."""
    values = {"a": 330.0, "b": 406.0, "c": 64.0 + 8e-4}
    kept = KeptStage.of("served", 800.0, values)
    assert all(kept.shares[model] >= value for model, value in values.items())
    again = KeptStage.of("served", kept.most, kept.shares)
    assert again.most == 800.0, "what all may use together does not grow, however often it is shared out"


def test_fairness_holds_for_each():
    assert KeptStage.of(FAIRNESS, 0.2, {"a": 0.1, "b": 0.0}).shares == {"a": 0.2, "b": 0.2}


def test_what_some_use_of_each_others_share_the_others_have_no_more():
    kept = KeptStage.of("served", 9.0, {"a": 4.0, "b": 3.0, "c": 2.0}).after({"a": 5.0, "b": 1.0})
    assert kept.shares == {"a": 5.5, "b": 1.5, "c": 2.0}
    assert sum(kept.shares.values()) == pytest.approx(kept.most)


class Kept(dict):
    """What a program was told to keep."""

    def keep(self, name, limit):
        self[name] = limit


def test_programs_keep_it_with_the_slack_of_all_models():
    kept, whole, part = KeptStage.of("served", 10.0, {"a": 9.5, "b": 0.5}), Kept(), Kept()
    kept.keep(whole)
    kept.keep_of(part, ["b"])
    assert whole == {"served": pytest.approx(10.0 + SLACK * 10.5, abs=1e-12)}
    assert part == {"served": pytest.approx(0.5 + SLACK * 10.5, abs=1e-12)}


def test_no_number_of_sweeps_uses_the_slack_twice():
    """Each model in turn takes all that it may, and what all then have is still within what all may come to."""
    kept, values = KeptStage.of("served", 200.0, {"a": 100.0, "b": 100.0}), {"a": 100.0, "b": 100.0}
    whole = Kept()
    kept.keep(whole)
    for _ in range(50):
        for model in list(values):
            part = Kept()
            kept.keep_of(part, [model])
            values[model] = part["served"]
            kept = kept.after({model: values[model]})
        assert sum(values.values()) <= whole["served"] + 1e-9
        kept = KeptStage.of("served", kept.most, values)
    assert kept.most == 200.0
