"""A client of an engine in this process, without HTTP between them."""

import threading

from fabrictool.engines.reference.answers import GenerationRequest
from fabrictool.engines.reference.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


class Client:
    """Asks, and keeps what it hears."""

    def __init__(self, engine):
        self.engine, self.lock, self.heard, self.over = engine, threading.Lock(), {}, {}

    def ask(self, prompt, most, *, first=lambda: None, **more):
        """`first` is called, by the engine's own thread, when the first token has come."""
        over, events = threading.Event(), []

        def hear(event):
            if not events:
                first()
            events.append(event)
            if event.finish is not None:
                over.set()

        number = self.engine.submit(GenerationRequest(prompt, most, GREEDY, **more), hear)
        self.heard[number], self.over[number] = events, over
        return number

    def text(self, number):
        assert self.over[number].wait(60)
        events = self.heard[number]
        assert [e.tokens for e in events] == sorted(e.tokens for e in events)
        return "".join(e.text for e in events), events[-1].finish

    def tokens(self, number):
        return self.heard[number][-1].tokens if self.heard[number] else 0

    def until(self, number, tokens):
        """Waits until so many tokens have come."""
        while self.tokens(number) < tokens and not self.over[number].wait(0.001):
            pass


def prompt(rng, length):
    return [rng.randrange(2, 250) for _ in range(length)]
