"""Hosts from words and hostfiles, and what is remembered of them."""

import json

import pytest

from splitinfer.errors import ConfigError
from splitinfer.launch.hosts import MOST_HOSTS, Host, Last, choose, decode, from_hostfile, from_words, hosts_of


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("mini.local", Host("mini", "mini.local")),
        ("eve@mini.local", Host("mini", "eve@mini.local")),
        ("mini.local:7000", Host("mini", "mini.local", None, 7000)),
        ("left=10.0.0.3", Host("left", "10.0.0.3")),
        ("10.0.0.3", Host("10.0.0.3", "10.0.0.3")),
        ("[fe80::1%en5]:7000", Host("fe80::1%en5", "fe80::1%en5", None, 7000)),
    ],
)
def test_a_word_is_a_host(word: str, host: Host):
    assert from_words([word]) == (host,)


@pytest.mark.parametrize(
    "word",
    ["", "-oProxyCommand=touch /tmp/x", "a b", "mini;reboot", "eve@-mini", "-v@mini", "mini:0", "mini:99999", "mini:",
     "$(x)", "mini\n", "=mini", "x=-mini", "a@b@c"],
)  # fmt: skip
def test_what_is_no_host_is_refused(word: str):
    with pytest.raises(ConfigError, match="a host is "):
        from_words([word])


def test_hosts_get_names_of_their_own():
    hosts = from_words(["eve@mini.local", "mini.lan", "mini.local:7000"])
    assert [each.name for each in hosts] == ["mini", "mini-2", "mini-3"]
    for words, said in ((["mini", "mini"], "twice"), (["a=mini", "a=air"], "two hosts are named a")):
        with pytest.raises(ConfigError, match=said):
            from_words(words)
    with pytest.raises(ConfigError, match="are too many"):
        from_words(f"h{i}" for i in range(MOST_HOSTS + 1))


ENTRIES = [
    {"ssh": "studio.local", "ips": ["192.168.1.1"], "rdma": [None, "rdma_en2"]},
    {"ssh": "eve@mini", "ips": ["192.168.1.2", "10.0.0.2"], "rdma": ["rdma_en2", None]},
    {"ssh": "air", "ips": []},
]


@pytest.mark.parametrize("text", [json.dumps(ENTRIES), json.dumps({"backend": "jaccl", "envs": [], "hosts": ENTRIES})])
def test_a_hostfile_without_this_machine(text: str):
    found = from_hostfile(text, "h.json", {"Studio.local"})
    assert found == (Host("mini", "eve@mini", "192.168.1.2"), Host("air", "air"))
    assert found == from_hostfile(text, "h.json", {"192.168.1.1"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("{}", "not a hostfile"),
        ("[]", "not a hostfile"),
        ("[1]", "host 1 of h.json has no name"),
        ('[{"ssh": "-oProxyCommand=x"}]', "host 1 of h.json has no name"),
        ('[{"ssh": "a:1"}]', "has no name"),
        ('[{"ssh": "a", "ips": ["1;2"]}]', "is not an address"),
        ('[{"ssh": "a", "ips": "x"}]', "not a list of addresses"),
        ('[{"ssh": "localhost"}]', "no machine but this one"),
    ],
)
def test_what_is_no_hostfile_is_refused(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        from_hostfile(text, "h.json", set())


def test_the_last_time_is_remembered():
    last = Last(from_words(["eve@mini:7000", "air"]), "demo")
    assert decode(last.encode(), "last.json") == last
    assert choose(last, (), None) == last
    assert choose(last, (), "other") == Last(last.hosts, "other")
    assert choose(last, from_words(["third"]), None) == Last(from_words(["third"]), "demo")
    assert hosts_of(last, ()) == last.hosts
    assert hosts_of(last, from_words(["eve@mini", "new"])) == (last.hosts[0], *from_words(["new"]))


def test_nothing_is_remembered_yet():
    nothing = decode(None, "last.json")
    with pytest.raises(ConfigError, match="no host is known yet"):
        choose(nothing, (), "demo")
    with pytest.raises(ConfigError, match="no model is known yet"):
        choose(nothing, from_words(["mini"]), None)
    with pytest.raises(ConfigError, match="no host is known yet"):
        hosts_of(nothing, ())
    with pytest.raises(ConfigError, match="remove it"):
        decode('{"hosts": 3}', "last.json")
