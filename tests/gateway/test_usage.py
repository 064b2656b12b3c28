"""What an answer says of its tokens, in the words of each API."""

import json

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
        (b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": 7}}', (7, 2, 7)),
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
    assert usage.counted == (figures != (0, 0, 0) and b"message_start" not in text)


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
    assert with_usage(body, options=False).replace(b'"stream_options":{"include_usage":true},', b"") == body


@pytest.mark.parametrize(
    ("options", "wishes"),
    [
        (b"null", {"include_usage": True}),
        (b'{"include_usage": false}', {"include_usage": True}),
        (
            b'{"include_usage": null, "continuous_usage_stats": true}',
            {"include_usage": True, "continuous_usage_stats": True},
        ),
    ],
)
def test_a_wish_for_no_figures_is_overruled_and_others_stay(options, wishes):
    body = with_usage(b'{"model": "m", "stream_options": %s, "top_p": 0.10}' % options, options=True)
    assert json.loads(body) == {"model": "m", "top_p": 0.1, "stream_options": wishes}
    assert b"0.10" in body, "as it was written"


@pytest.mark.parametrize("figure", [-1, -(10**30), 2**40 + 1, 2**63, 10**300, 1.5, "7", None])
@pytest.mark.parametrize("where", ["prompt_tokens", "completion_tokens", "cached"])
def test_figures_that_cannot_be_are_not_believed(figure, where):
    figures = {"prompt_tokens": 5, "completion_tokens": 7}
    figures |= {"prompt_tokens_details": {"cached_tokens": figure}} if where == "cached" else {where: figure}
    for read in (Usage.read, Usage.read_end):
        usage = Usage()
        read(usage, json.dumps({"usage": figures}).encode())
        assert all(type(n) is int and 0 <= n <= 2**40 for n in (usage.prompt, usage.cached, usage.completion))
        assert usage.counted == (figure is None)


def test_an_anthropic_stream_is_counted_when_it_has_ended():
    usage = Usage()
    begin = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 0}
    usage.read(json.dumps({"type": "message_start", "message": {"usage": begin}}).encode())
    assert (usage.prompt, usage.cached, usage.completion, usage.counted) == (125, 100, 0, False)
    usage.read(b'{"type": "message_delta", "usage": {"output_tokens": 9}}')
    assert (usage.prompt, usage.cached, usage.completion, usage.counted) == (125, 100, 9, True)


def test_the_figures_of_an_answer_of_which_the_end_is_known():
    figures = b'"usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}'
    for tail in (
        b'ens": 1}, "text": "usage", ' + figures + b', "x": [1]}',
        b'\xa9 {"usage": {"a": 1}}, ' + figures + b"}",
    ):
        usage = Usage()
        usage.read_end(tail)
        assert (usage.prompt, usage.cached, usage.completion, usage.counted) == (5, 4, 7, True)
    for nothing in (b"", b'"usage": {', b'"usage": {"prompt_tokens": "x"}}'):
        usage = Usage()
        usage.read_end(nothing)
        assert not usage.counted
