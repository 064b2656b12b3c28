"""What a service record has room for, and what earlier releases make of it."""

import msgspec
import pytest

from fabrictool.domain.steps import MeasuredSteps
from fabrictool.mesh.records import (
    MAX_ADAPTERS,
    MAX_BODY_OCTETS,
    NOTE_ROOM_OCTETS,
    Lifecycle,
    RecordError,
    ServiceBody,
    decode,
    seal,
    with_steps,
)

STEPS = MeasuredSteps((4_000, 5_000, 7_000, 11_000), (3_000, 3_200, 3_900))
BODY = ServiceBody("f", bytes(16), bytes(16), Lifecycle.SERVING, 1, "m/0", "m", "vllm")


def sealed(body):
    return seal(body, lambda _: bytes(64))


class Former(msgspec.Struct, tag="s", omit_defaults=True):
    """As far as an earlier release knows it."""

    replica: str
    model: str
    dp: int = 1


def test_what_was_measured_passes_through_a_record_and_an_earlier_release_overlooks_it():
    record = sealed(with_steps(BODY, STEPS))
    body = decode(record.envelope).body
    assert body.steps == STEPS
    assert [tokens for tokens, _ in body.steps.of_prompts()] == [32, 64, 128, 256]
    former = msgspec.msgpack.decode(record.envelope.body, type=Former)
    assert (former.replica, former.dp) == ("m/0", 1)
    assert sealed(with_steps(BODY, None)).envelope == sealed(BODY).envelope, "who measured nothing writes what it did"


def test_what_was_measured_gives_way_to_a_note():
    for letters in range(10, 30):
        body = msgspec.structs.replace(BODY, adapters=tuple("a" * letters + str(n) for n in range(MAX_ADAPTERS)))
        told = with_steps(body, STEPS)
        octets = len(msgspec.msgpack.encode(told))
        assert octets + NOTE_ROOM_OCTETS <= MAX_BODY_OCTETS or told == body
    assert told == body


@pytest.mark.parametrize("steps", [[[], [1]], [[1] * 25, [1]], [[-1], [1]], [[2**32], [1]], [["x"], [1]], [[1]], "x"])
def test_a_record_with_steps_that_are_none_is_refused(steps):
    fields = msgspec.to_builtins(BODY, builtin_types=(bytes,)) | {"type": "s", "steps": steps}
    envelope = msgspec.structs.replace(sealed(BODY).envelope, body=msgspec.msgpack.encode(fields))
    with pytest.raises(RecordError, match="FT6102"):
        decode(envelope)
