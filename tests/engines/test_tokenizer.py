import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.base.errors import InvalidInputError
from fabrictool.engines.reference.tokenizer import TemplateError, TextStream, Tokenizer
from fabrictool.engines.reference.weights import load_weights

HARD = "Grüße, 東京! 👩‍🚀 naïve <|im_start|> 1234\n\ttab  two"


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer(tiny.metadata)


@pytest.fixture(scope="module")
def real(smollm2_path, smollm2_cache):
    return Tokenizer(load_weights(smollm2_path, smollm2_cache, lambda _: None).metadata)


def streamed(tokenizer, tokens, stop=()):
    stream = TextStream(tokenizer, stop)
    parts = []
    for token in tokens:
        parts.append(stream.push(token))
        if stream.stopped:
            return parts
    return [*parts, stream.finish()]


@given(st.text())
def test_any_text_survives_the_way_to_tokens_and_back(tiny, text):
    tokenizer = Tokenizer(tiny.metadata)
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text.replace("<|begin|>", "").replace("<|end|>", "")


def test_real_vocabulary(real):
    plain = HARD.replace("<|im_start|>", "")
    assert "".join(streamed(real, real.encode(plain))) == plain
    assert real.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert real.encode("<|im_start|>user") == [1, 4093]  # a control token, then an ordinary one
    assert len(real.encode("1234")) == 4  # digits one by one, as the model learned them
    assert real.ends == {2}


def test_characters_never_break(tokenizer):
    for part in streamed(tokenizer, [t for octet in "é東👩".encode() for t in [octet_token(tokenizer, octet)]]):
        assert "\ufffd" not in part
    broken = streamed(tokenizer, [octet_token(tokenizer, octet) for octet in "東".encode()[:2]])
    assert broken == ["", "", "\ufffd"]  # cut off by max_tokens: one mark, at the very end


def octet_token(tokenizer, octet):
    return tokenizer._bytes.index(bytes([octet]))


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("ababac", ["abac"], "ab"),
        ("x\n\ny", ["\n\n"], "x"),
        ("both", ["th", "ot"], "b"),
        ("early late", ["late", "early"], ""),
        ("東京都", ["京"], "東"),
        ("ends with EN", ["END"], "ends with EN"),
    ],
)
def test_stop_strings_across_tokens(tokenizer, text, stop, wanted):
    for tokens in (tokenizer.encode(text), [octet_token(tokenizer, octet) for octet in text.encode()]):
        assert "".join(streamed(tokenizer, tokens, stop)) == wanted


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_stop_strings_equal_a_search_in_the_whole_text(tiny, text, stop):
    tokenizer = Tokenizer(tiny.metadata)
    ends = [text.find(one) for one in stop if one in text]
    # The text is searched as it grows: the stop string that is complete first wins, its earliest beginning on a tie.
    done = min((text.find(one) + len(one) for one in stop if one in text), default=None)
    wanted = text if done is None else text[: min(text.find(o, 0, done) for o in stop if o in text[:done])]
    tokens = [octet_token(tokenizer, octet) for octet in text.encode()]
    assert "".join(streamed(tokenizer, tokens, stop)) == wanted
    assert (done is None) == (not ends)


def test_chat_template_of_the_model(real):
    tokens = real.encode_chat([{"role": "user", "content": "Hi"}])
    text = b"".join(real.octets(t) for t in tokens).decode()
    assert text == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\nHi\nassistant\n"
    )
    assert tokens[0] == 1
    own = real.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert b"".join(real.octets(t) for t in own).decode() == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_chat_templates_run_in_a_sandbox(tiny):
    for source in ("{{ ''.__class__.__mro__ }}", "{{ raise_exception('no system role') }}", "{{ messages.append(1) }}"):
        hostile = Tokenizer({**tiny.metadata, "tokenizer.chat_template": source})
        with pytest.raises(TemplateError):
            hostile.encode_chat([{"role": "user", "content": "x"}])
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer({k: v for k, v in tiny.metadata.items() if k != "tokenizer.chat_template"}).encode_chat([])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer.ggml.model": "llama"}, "FT7021"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "FT7021"),
        ({"tokenizer.chat_template": "{% for %}"}, "FT7020"),
        ({"tokenizer.ggml.merges": None}, "FT7020"),
    ],
)
def test_tokenizers_of_another_kind_are_refused(tiny, change, code):
    with pytest.raises(InvalidInputError) as caught:
        Tokenizer({**tiny.metadata, **change})
    assert caught.value.problems[0].code == code


def test_llama3_splits_words_and_numbers(tiny):
    tokenizer = Tokenizer({**tiny.metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert "".join(streamed(tokenizer, tokenizer.encode("the end and 12345"))) == "the end and 12345"
