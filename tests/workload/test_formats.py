"""Every known trace is read by its columns; what is broken is counted, and only coded errors come out."""

import json
import random
import string

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.gateway.records import RequestRecord
from fabrictool.workload.formats import FORMATS, read
from fabrictool.workload.trace import dumps

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.509930+00:00,2399,6
2024-05-10 00:00:02+00:00,76,15
"""
BURSTGPT_1 = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_2 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0.5,a1,3.25,GPT-4,100,20,120,Conversation log
2.5,,,ChatGPT,200,30,230,API log
4.5,a1,1.5,GPT-4,300,40,340,Conversation log
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1100, "output_length": 490, "hash_ids": [0, 1, 46]}
{"timestamp": 3500, "input_length": 100, "output_length": 794, "hash_ids": [47]}
"""
SWISS_AI = """\
{"status": "DEFAULT", "created_at": "2025-03-01T10:00:00.5Z", "finished_at": "2025-03-01T10:00:04.5Z", "model": "a/b",\
 "reported_token_input": 10, "reported_token_output": 20, "model_parameters": {"t": [1, "x"]}}
{"status": null, "created_at": "2025-03-01T10:00:01.5Z", "finished_at": null, "model": "c/d",\
 "reported_token_input": 30, "reported_token_output": 40, "model_parameters": null}
{"status": "ERROR", "created_at": "2025-03-01T10:00:02.5Z", "finished_at": null, "model": "c/d",\
 "reported_token_input": 50, "reported_token_output": 60}
"""
SPLITWISE = """\
request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,1,1,4096,32
1,2,0,3,1,2048,8
"""
AIBRIX = "timestamp_ms,prompt_len,output_len\n6011,178,8\n6917,258,40\n"
RECORDS = """\
{"t": 1, "in": 30, "out": 5, "ttft": 0.125, "latency": 0.5}
{"t": 0, "in": 20, "out": 4, "ttft": NaN, "latency": -1}
{"t": 2, "in": 10, "out": 3, "latency": 0.25}
"""
SHAREGPT = json.dumps([
    {"id": "a", "conversations": [
        {"from": "human", "value": "x" * 40},
        {"from": "gpt", "value": "y" * 80},
        {"from": "human", "value": "x" * 4},
        {"from": "gpt", "value": "y"},
    ]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "an answer to nothing"}, {"from": "human"}]},
    {"id": "c"},
])  # fmt: skip
REQUEST_RECORDS = "\n".join(
    msgspec.json.encode(
        RequestRecord(
            name, at, "/v1/x", status, end, 2.5, model="m", prompt_tokens=9, completion_tokens=30, ttft_s=0.25
        )
    ).decode()
    for name, at, status, end in (
        ("a", 1700000000.0, 200, "answered"),
        ("b", 1700000001.5, 499, "cancelled"),
        ("c", 1700000002.0, 404, "refused"),
        ("d", 1700000003.0, 200, "answered"),
    )
)
"""As a gateway writes them: who was refused or went away is no demand that was met."""

KNOWN = {
    "records": (REQUEST_RECORDS, [0, 3], [9, 9], [30, 30]),
    "azure-2023": (AZURE_2023, [0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55]),
    "azure-2024": (AZURE_2024, [0, 0.5, 1.99007], [2162, 2399, 76], [5, 6, 15]),
    "burstgpt-1": (BURSTGPT_1, [0, 40, 113], [472, 1087, 417], [18, 230, 276]),
    "burstgpt-2": (BURSTGPT_2, [0, 2, 4], [100, 200, 300], [20, 30, 40]),
    "mooncake": (MOONCAKE, [0, 3, 3.5], [1500, 1100, 100], [500, 490, 794]),
    "swiss-ai": (SWISS_AI, [0, 1], [10, 30], [20, 40]),
    "splitwise": (SPLITWISE, [0, 2], [4096, 2048], [32, 8]),
    "aibrix": (AIBRIX, [0, 0.906], [178, 258], [8, 40]),
    "sharegpt": (SHAREGPT, [0, 1], [10, 31], [20, 1]),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("change", [str, lambda text: "\ufeff" + text, lambda text: text.replace("\n", "\r\n")])
def test_a_known_trace(name, change):
    text, times, prompts, outputs = KNOWN[name]
    trace = read(change(text))
    assert trace.arrival == pytest.approx(times, abs=1e-5)
    assert trace.prompt.tolist() == prompts
    assert trace.output.tolist() == outputs


def test_models_are_told_apart():
    trace = read(BURSTGPT_1)
    assert trace.models == ("ChatGPT", "GPT-4")
    assert trace.model.tolist() == [0, 0, 1]
    assert trace.of_model("GPT-4").prompt.tolist() == [417]
    assert read(SWISS_AI).models == ("a/b", "c/d")
    assert read(AZURE_2023).models == ("",)
    assert read(AZURE_2023).model is None


def test_measured_latencies_are_kept():
    assert read(SWISS_AI).latency.tolist() == pytest.approx([4.0, np.nan], nan_ok=True)
    assert read(BURSTGPT_2).latency.tolist() == pytest.approx([3.25, np.nan, 1.5], nan_ok=True)
    assert read(BURSTGPT_1).latency is None


def test_prefixes_are_kept():
    trace = read(MOONCAKE)
    assert trace.block_tokens == 512
    assert trace.chain_start.tolist() == [0, 3, 6, 7]
    first, second, third = (trace.chain[i:j].tolist() for i, j in ((0, 3), (3, 6), (6, 7)))
    assert first[:2] == second[:2]
    assert len({*first, *second, *third}) == 5


def test_failed_and_shapeless_rows_are_counted():
    assert read(SWISS_AI).dropped == {"failed requests": 1}
    assert read(SHAREGPT).dropped == {"no text": 1, "no conversation": 1}


def test_rows_are_sorted_and_columns_found_in_any_order():
    trace = read("in,junk,T,out\n5,x,9,50\n3,y,7,30\n4,z,8,40\n")
    assert trace.arrival.tolist() == [0, 1, 2]
    assert trace.prompt.tolist() == [3, 4, 5]
    assert trace.output.tolist() == [30, 40, 50]


@pytest.mark.parametrize("name", KNOWN)
def test_our_own_lines_say_the_same(name):
    trace = read(KNOWN[name][0])
    lines = list(dumps(trace))
    again = read("\n".join(lines))
    assert list(dumps(again)) == lines
    assert again.models == trace.models
    assert again.block_tokens == trace.block_tokens
    assert again.arrival == pytest.approx(trace.arrival, abs=1e-6)
    assert (again.latency is None) == (trace.latency is None)


def test_a_third_of_the_rows_is_broken():
    good = [f"2023-11-16 18:{m:02}:46.6805900,{100 + m},{m + 1}" for m in range(40)]
    bad = ["", "yesterday,5,5", ",5,5", "2023-11-16 18:15:46,,5", "2023-11-16 18:15:46,5", "2023-11-16 18:15:46,nan,5"]
    bad += ["2023-11-16 18:15:46,0,5", "2023-11-16 18:15:46,-3,5", "2023-11-16 18:15:46,5,1e999", "inf,5,5"]
    bad += [
        "nan,5,5",
        "2023-13-16 18:15:46,5,5",
        "2023-11-16 18:15:46,many,5",
        "1e300,5,5",
        "2023-11-16 18:15:46,5,5e9",
    ]
    rows = [*good, *bad[1:], *bad[1:7]]
    random.Random(1).shuffle(rows)
    trace = read("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert len(trace) == 40
    assert sorted(trace.prompt.tolist()) == [100 + m for m in range(40)]
    assert trace.dropped == {"no time": 8, "no token count": 12}


def test_broken_json_lines_are_counted_even_when_they_come_first():
    lines = ['{"timestamp": 1}', "{not json", "[1, 2]", '"text"', "5", "{}", "[" * 100_000, *MOONCAKE.splitlines()]
    trace = read("\n".join(lines))
    assert trace.prompt.tolist() == [1500, 1100, 100]
    assert trace.dropped == {"not JSON": 2, "not an object": 3, "no token count": 1, "no time": 1}


def test_entries_of_an_array_that_are_no_objects_are_counted():
    trace = read('[1, {"t": 0, "in": 3, "out": 4}, null, {"t": 1, "in": true, "out": [4]}]')
    assert trace.prompt.tolist() == [3]
    assert trace.dropped == {"not an object": 2, "no token count": 1}


def test_a_field_that_no_csv_reader_takes_is_counted():
    trace = read(f"t,in,out\n0,1,1\n{'9' * 200_000},1,1\n1,2,2\n")
    assert trace.prompt.tolist() == [1, 2]
    assert trace.dropped == {"not CSV": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "a,b,c\n1,2,3\n",
        "t,in,out\n",
        "t,in,out\nx,1,1\n",
        "[]",
        "[1, 2]",
        "[" * 100_000,
        "{",
        '{"a": 1}',
        '{"conversations": []}',
        '[{"conversations": "no list"}]',
        "9" * 200_000,
        "timestamp,contexttokens,generatedtokens\n2023-11-16 18:15:46,0,0\n",
    ],
)
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(InvalidInputError, match="FT2201"):
        read(text)


def test_odd_values_in_our_own_lines():
    lines = [
        '{"t": 0, "in": 1, "out": 1, "prefix": [{"a": 1}, "x", null], "block": "abc", "model": "\\ud800"}',
        '{"t": 1e400, "in": 1, "out": 1}',
        f'{{"t": 1, "in": {10**400}, "out": 1}}',
        f'{{"t": {10**400}, "in": 1, "out": 1}}',
        '{"t": 1, "in": 1, "out": 1, "prefix": "no", "block": [], "latency": -3}',
    ]
    trace = read("\n".join(lines))
    assert len(trace) == 2
    assert trace.block_tokens == 16
    assert "\n".join(dumps(trace)).encode()
    assert trace.models[0].encode()


COLUMNS = sorted({name for f in FORMATS for name in (*f.time, *f.prompt, *f.output, *f.model, *f.finish, *f.took)})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["2023-11-16 18:15:46.6805900", "1", "0.5", "1e999", "9" * 5000])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.dictionaries(st.sampled_from([*COLUMNS, "hash_ids", "prefix", "block", "status", "conversations"]), VALUES)


def survives(text):
    try:
        trace = read(text)
    except FabrictoolError:
        return
    assert len(trace) >= 1
    assert trace.arrival[0] == 0
    assert np.isfinite(trace.arrival).all()
    assert (np.diff(trace.arrival) >= 0).all()
    assert min(trace.prompt.min(), trace.output.min()) >= 1
    assert "\n".join(dumps(trace)).encode()


@given(st.text())
def test_any_text_is_a_trace_or_a_coded_error(text):
    survives(text)


@given(st.lists(ROWS | VALUES, max_size=6), st.booleans())
def test_any_json_is_a_trace_or_a_coded_error(rows, lines):
    parts = [json.dumps(row) for row in rows]
    survives("\n".join(parts) if lines else f"[{','.join(parts)}]")


@given(st.sampled_from(FORMATS), st.lists(st.lists(SCALARS.map(str), max_size=5), max_size=6), st.randoms())
def test_any_csv_is_a_trace_or_a_coded_error(known, rows, rng):
    header = [*known.time, *known.prompt, *known.output, *known.model, *known.finish, rng.choice(string.ascii_letters)]
    rng.shuffle(header)
    survives("\n".join([",".join(header), *(",".join(row) for row in rows)]))


def test_records_of_a_service_keep_their_latencies():
    trace = read(RECORDS)
    np.testing.assert_array_equal(trace.ttft, [np.nan, 0.125, np.nan])
    np.testing.assert_array_equal(trace.latency, [np.nan, 0.5, 0.25])
    again = read("\n".join(dumps(trace)))
    np.testing.assert_array_equal(again.ttft, trace.ttft)
    np.testing.assert_array_equal(trace.only(slice(1, 2)).ttft, [0.125])
    assert read(AIBRIX).ttft is None


def test_a_stray_quote_costs_its_own_line_only():
    trace = read('t,in,out\n0,10,10\n"1,10,10\n2,10,10\n3,"10,10\n4,10,10\n5,1,1\n')
    assert trace.arrival.tolist() == [0, 2, 4, 5]
    assert trace.dropped == {"not CSV": 2}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_quotes_that_close_are_read(end):
    trace = read(end.join(["t,in,out,model", '0,10,10,"a, ""b"""', '1,"20",10,c', ""]))
    assert trace.models == ('a, "b"', "c")
    assert trace.dropped == {}


@pytest.mark.parametrize("odd", ["\u2028", "\u0085", "\u2029", "\x1c"])
def test_only_a_line_feed_ends_a_line_of_json(odd):
    name = json.dumps(f"a{odd}b", ensure_ascii=odd < " ")
    trace = read(f'{{"t": 0, "in": 1, "out": 1, "model": {name}}}\n{{"t": 1, "in": 1, "out": 1, "model": {name}}}')
    assert len(trace) == 2
    assert trace.models == (f"a{odd}b",)
    assert trace.dropped == {}


def test_one_size_of_block_holds_for_a_whole_trace():
    def line(t, ids, block):
        return json.dumps({"t": t, "in": 2000, "out": 1, "prefix": ids} | block)

    trace = read("\n".join([
        line(0, [0, 1], {"block": 512}),
        line(1, [0, 1], {"block": 16}),
        line(2, [0, 2], {}),
        line(3, [], {"block": 16}),
    ]))  # fmt: skip
    assert trace.arrival.tolist() == [0, 2, 3]
    assert trace.block_tokens == 512
    assert trace.dropped == {"another block size": 1}


def test_a_chain_of_prefixes_ends_where_an_id_comes_again():
    rows = [[7, 7, 8], [7, 9, 10, 9, 11], [7, 9]]
    trace = read("\n".join(json.dumps({"t": t, "in": 99, "out": 1, "prefix": ids}) for t, ids in enumerate(rows)))
    assert trace.chain_start.tolist() == [0, 1, 4, 6]
    assert trace.chain.tolist() == [0, 0, 1, 2, 0, 1]
    assert len(trace) == 3
    assert trace.dropped == {"prefix chains cut at a repeated id": 2}
