def test_a_login_node_is_reached_from_the_operator(bed):
    assert bed.ssh("a-login", "hostname").stdout == "a-login\n"


def test_a_relay_swallows(bed):
    with bed.relay("a-login", delay_s=0.1) as relay:
        assert bed.ssh("a-login", "hostname", via=relay).stdout == "a-login\n"
        relay.set(swallow=True)
        assert bed.ssh("a-login", "hostname", via=relay, options=["ConnectTimeout=1"]).returncode == 255
