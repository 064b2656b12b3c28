"""What an answer says of its tokens, in the words of each API."""

import pytest

from fabrictool.gateway.usage import Usage, tokens_in, with_usage


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (
            b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens": 7}}',
            (5, 4, 7),
        ),
        (b'{"usage": {"completion_tokens_details": {"a": 1}, "completion_tokens": 7, "prompt_tokens": 5}}', (5, 0, 7)),
        (b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 7}}', (5, 2, 7)),
        (b'{"type": "x", "response": {"usage": {"input_tokens": 5, "output_tokens": 7}}}', (5, 0, 7)),
        (b'{"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}', (5, 0, 1)),
        (b'{"usage": null}', (0, 0, 0)),
        (b"[1]", (0, 0, 0)),
        (b"{", (0, 0, 0)),
    ],
)
def test_figures_in_the_words_of_each_api(text, figures):
    usage = Usage()
    usage.read(text)
    assert (usage.prompt, usage.cached, usage.completion) == figures
    assert usage.counted == (figures != (0, 0, 0))


def test_figures_of_a_stream_of_messages_come_in_two_events():
    usage = Usage()
    events = (
        b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}\n\n'
        b'event: message_delta\ndata: {"usage": {"output_tokens": 30}}\n\n'
    )
    assert usage.read_events(events) == events
    assert (usage.prompt, usage.completion) == (9, 30)


def test_only_the_event_of_figures_is_left_out():
    first, figures, last = (
        b'data: {"choices": [{"delta": {"content": "a \\"usage\\": {"}}]}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\r\n\r\n',
        b"data: [DONE]\n\n",
    )
    assert Usage().read_events(first + figures + last) == first + last
    assert Usage().read_events(last) is None
    assert tokens_in(first + figures + last) == 1


@pytest.mark.parametrize("body", [b'{"model":"m"}', b' \n{ "model" : "m" }'])
def test_the_wish_for_figures_changes_nothing_else(body):
    assert with_usage(body).replace(b'"stream_options":{"include_usage":true},', b"") == body
