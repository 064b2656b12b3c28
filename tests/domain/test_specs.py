"""What earlier releases wrote is read, and counts as the same: an upgrade replaces nothing that runs."""

import msgspec
import pytest

from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import decode_spec, encode_spec, weight_key
from fabrictool.domain.state import Placed, State

AGENT = (
    b'{"unit":"agent","fabric":"f","provider":"p","site":"s","cluster":"c","node":"gpu","replica":"m/0","m'
    b'odel":"m","source":"hf://m","engine":"vllm","precision":"bf16","context":8192,"tp":2,"pp":1,"phase":'
    b'"unified","max_num_seqs":8,"device":"h100-sxm","devices":2,"device_indices":[0,1],"visibility_variab'
    b'le":"CUDA_VISIBLE_DEVICES","memory":1,"options":{},"hubs":[["h",1]],"walltime_s":null,"drain_s":20.0'
    b',"start_timeout_s":600.0}'
)
GATEWAY = (
    b'{"unit":"gateway","fabric":"f","provider":"p","site":"s","cluster":"c","node":"c","name":"main","lis'
    b'ten":["h",1],"mesh":["h",2],"policy":"least-loaded","retries":2,"groups":{},"tenants":{},"keys":"","'
    b'model_providers":{}}'
)


@pytest.mark.parametrize(("written", "digest"), [(AGENT, "c664545fac435833"), (GATEWAY, "a5cd513ae84f0a79")])
def test_specs_of_the_first_release_keep_their_bytes_and_digests(written, digest):
    spec = decode_spec(written)
    assert encode_spec(spec) == written, "an earlier release can read it, too"
    assert spec_digest(spec) == digest


def test_a_state_of_the_first_release_is_read():
    written = b'{"schema":1,"fabric":"f","units":{"replica/m/0":{"cluster":"c","node":"gpu","operation":"o"}}}'
    state = msgspec.json.decode(written, type=State)
    assert state.units == {"replica/m/0": Placed(cluster="c", partition="gpu", operation="o")}
    assert msgspec.to_builtins(state)["units"]["replica/m/0"]["node"] == "gpu"


def test_weights_are_written_only_where_there_are_some():
    spec = decode_spec(GATEWAY)
    assert spec.routing_weights == {}
    weighed = msgspec.structs.replace(spec, weights={weight_key("m", "c", "gpu", 2): 0.25})
    assert decode_spec(encode_spec(weighed)) == weighed
    assert spec_digest(weighed) != spec_digest(spec)
