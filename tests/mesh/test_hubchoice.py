"""Which hubs an agent keeps: two, of two providers where it can have that, and no race without an end."""

import itertools
import random

import pytest

from fabrictool.mesh.hubchoice import ENOUGH, RACE, RACE_BEATS, HubChoice, LinkedHub

HUBS = [f"h{number}" for number in range(12)]


def choice():
    return HubChoice(random.Random(7))


def of(*providers, start=0):
    """Linked hubs, oldest first."""
    return {HUBS[start + number]: LinkedHub(provider) for number, provider in enumerate(providers)}


def test_without_a_hub_it_tries_a_few_and_then_more():
    agent = choice()
    tried = [agent.wanted(HUBS, {}, providers=0, beat=True) for _ in range(4 * RACE_BEATS)]
    assert [len(hubs) for hubs in tried[:: RACE_BEATS + 1]] == [RACE, 2 * RACE, 3 * RACE]
    for fewer, more in itertools.pairwise(tried):
        assert fewer <= more
    assert tried[-1] == set(HUBS)


def test_agents_do_not_all_try_the_same_first():
    first = [frozenset(HubChoice(random.Random(seed)).wanted(HUBS, {}, providers=0)) for seed in range(20)]
    assert len(set(first)) > 10


@pytest.mark.parametrize(
    ("linked", "providers", "kept"),
    [
        (of("alpha", "beta"), 2, {"h0", "h1"}),
        (of("alpha", "alpha", "beta", "gamma"), 3, {"h0", "h2"}),
        (of("alpha", "alpha", "alpha"), 1, {"h0", "h1"}),
    ],
    ids=["two-providers", "the-oldest-of-another-provider", "one-provider"],
)
def test_two_are_enough(linked, providers, kept):
    assert choice().wanted(HUBS, linked, providers=providers) == kept
    assert len(kept) == ENOUGH


def test_a_hub_that_clients_ask_goes_before_one_that_only_carries():
    linked = {"h0": LinkedHub("alpha", ingress=False), "h1": LinkedHub("beta", ingress=False), **of("alpha", start=2)}
    assert choice().wanted(HUBS, linked, providers=2) == {"h2", "h1"}


def test_of_two_of_one_provider_it_keeps_both_and_looks_for_another_s():
    agent, linked = choice(), of("alpha", "alpha")
    wanted = agent.wanted(HUBS, linked, providers=2)
    assert {"h0", "h1"} < wanted
    assert len(wanted) == ENOUGH + RACE
    # Whoever turns out to be of the same provider is let go of, and not tried again.
    linked |= {hub: LinkedHub("alpha") for hub in sorted(wanted - {"h0", "h1"})}
    again = agent.wanted(HUBS, linked, providers=2)
    assert not again & (wanted - {"h0", "h1"})


def test_with_enough_it_dials_nobody_else_and_starts_anew_when_one_is_lost():
    agent = choice()
    for _ in range(20):
        agent.wanted(HUBS, of("alpha"), providers=2, beat=True)
    assert agent.wanted(HUBS, of("alpha", "beta"), providers=2, beat=True) == {"h0", "h1"}
    assert len(agent.wanted(HUBS, of("alpha"), providers=2)) == 1 + RACE
