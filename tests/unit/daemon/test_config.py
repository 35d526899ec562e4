"""The configuration: precedence of its sources, bounds, and errors that name field, value and limit.

Method: load() with given flags, environment and file; nothing of the machine is read.
"""

import dataclasses
import os

import pytest

from kvstored.access import tenants
from kvstored.config.config import MAX_DIR_BYTES, Config
from kvstored.config.sources import MAX_FILE_BYTES, default_dir, load
from kvstored.config.units import approximate_size, format_duration, format_size, parse_size
from kvstored.errors import ConfigError, StartupError


def loaded(flags=None, environ=None, file=None):
    return load({"dir": "/tmp/x", **(flags or {})}, environ or {}, file)


def write(tmp_path, text):
    path = tmp_path / "kvstored.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_within_their_bounds():
    found = loaded()
    assert found.config == Config(dir="/tmp/x", state_dir="/tmp/x")
    assert set(found.sources.values()) == {"default", "flag"}


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = write(tmp_path, 'memory = "1GiB"\nmax_sessions = 10\nmax_pins = 100\n')
    environ = {"KVSTORED_MEMORY": "2GiB", "KVSTORED_MAX_SESSIONS": "20"}
    found = loaded({"memory": "3GiB"}, environ, file)
    assert (found.config.memory, found.config.max_sessions, found.config.max_pins) == (3 << 30, 20, 100)
    assert found.config.max_leases == Config().max_leases
    sources = {name: found.sources[name] for name in ("memory", "max_sessions", "max_pins", "max_leases")}
    assert sources == {
        "memory": "flag",
        "max_sessions": "environment",
        "max_pins": "file",
        "max_leases": "default",
    }


def test_the_file_may_come_from_the_environment(tmp_path):
    file = write(tmp_path, "max_sessions = 10\n")
    assert loaded(environ={"KVSTORED_CONFIG": file}).config.max_sessions == 10


def test_entries_name_every_field_with_value_source_and_doc():
    entries = {entry["name"]: entry for entry in loaded({"memory": "4GiB"}).entries()}
    fields = [about.name for about in dataclasses.fields(Config)]
    fields[fields.index("namespaces")] = "namespaces.default"
    assert list(entries) == fields
    assert entries["memory"] == {**entries["memory"], "value": "4GiB", "source": "flag", "unit": "bytes"}
    assert all(entry["doc"] for entry in entries.values())


@pytest.mark.parametrize(
    "about", [f for f in dataclasses.fields(Config) if f.metadata["low"] is not None], ids=lambda f: f.name
)
def test_values_outside_of_bounds_are_refused_by_name_value_and_limit(about):
    for limit, step, word in ((about.metadata["low"], -1, "least"), (about.metadata["high"], 1, "most")):
        disk = {"disk": "/a"} if about.name == "disk_quota" and limit else {}
        loaded({about.name: str(limit), **disk})
        with pytest.raises(ConfigError) as error:
            loaded({about.name: limit + step, **disk})
        text = str(error.value)
        assert about.name in text and str(limit) in text and word in text


def test_every_number_has_both_bounds():
    numbers = [f for f in dataclasses.fields(Config) if type(f.default) in (int, float)]
    assert len(numbers) > 15
    assert [f.name for f in numbers if f.metadata["low"] is None or f.metadata["high"] is None] == []


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"memory": "much"}, ["memory", "'much'", "4GiB", "flag"]),
        ({"memory": "-1"}, ["memory", "'-1'"]),
        ({"max_pins": "3.5"}, ["max_pins", "'3.5'", "a whole number is wanted"]),
        ({"lease_timeout_s": "1s"}, ["lease_timeout_s", "'1s'", "a number of seconds is wanted"]),
        ({"drain_timeout_s": "nan"}, ["drain_timeout_s", "nan"]),
        ({"drain_timeout_s": "inf"}, ["drain_timeout_s", "inf"]),
        ({"pool": "clay"}, ["pool", "clay", "shm, memfd"]),
        ({"log_level": "loud"}, ["log_level", "loud", "debug, info, warning, error"]),
        ({"dir": "/" + "d" * MAX_DIR_BYTES}, ["dir", str(MAX_DIR_BYTES + 1), str(MAX_DIR_BYTES)]),
        ({"namespaces": "a=0.9,b=0.2"}, ["namespaces", "1.1", "the limit is 1"]),
        ({"namespaces": "a,b"}, ["namespaces", "one name at most"]),
        ({"namespaces": ",".join(f"n{i}=0.01" for i in range(17))}, ["namespaces", "17", "16"]),
        ({"namespaces": "Bad=1"}, ["namespaces", "'Bad'"]),
        ({"namespaces": "../x=1"}, ["namespaces", "'../x'"]),
        ({"memory": "8MiB", "namespaces": "a=0.1,b"}, ["namespaces", "'a'", "2MiB"]),
        ({"namespaces": "a:writers=65534"}, ["writers", "'a'", "65534"]),
        ({"namespaces": "a:readers=@65534"}, ["readers", "'a'", "65534"]),
        ({"namespaces": "a:readers=al*ice"}, ["readers", "'al*ice'"]),
        ({"namespaces": "a:writers=" + "+".join(map(str, range(65)))}, ["writers", "65", "64"]),
        ({"namespaces": "a:colour=red"}, ["'colour'", "memory, disk_quota, readers, writers, salt"]),
        ({"namespaces": "a:writers"}, ["'writers'", "'a'"]),
        ({"namespaces": "a=0.5,a=0.5"}, ["'a'", "twice"]),
        ({"namespaces": "a=0"}, ["memory", "'a'", "'0'"]),
        ({"namespaces": "a:disk_quota=-5GiB"}, ["disk_quota", "'a'", "'-5GiB'"]),
        ({"namespaces": {"a": {"memory": float("nan")}}}, ["memory", "'a'", "nan", "above 0"]),
        ({"namespaces": "a=1.5"}, ["memory", "'a'", "1.5", "at most 1"]),
        ({"namespaces": "a=2GiB"}, ["2147483648", "memory", "1073741824"]),
        ({"namespaces": "a:salt=red"}, ["salt", "'a'", "generated", "file:"]),
        ({"disk": "/a"}, ["disk_quota", "1 directories"]),
        ({"disk_quota": "1GiB"}, ["disk_quota", "0 directories"]),
        ({"disk": "/a,/a", "disk_quota": "1GiB"}, ["disk", "2 directories", "each once"]),
        ({"disk": "/a/b,/c,/a", "disk_quota": "1GiB"}, ["disk", "'/a/b' lies in '/a'"]),
        (
            {"disk": "/a", "disk_quota": "8MiB", "namespaces": "a=0.5:disk_quota=1MiB,b"},
            ["'a'", "1048576", "disk_quota", "2MiB"],
        ),
        (
            {"disk": "/a", "disk_quota": "8MiB", "namespaces": "a=0.5:disk_quota=9MiB,b"},
            ["disk_quota", "9437184", "8388608"],
        ),
    ],
)
def test_wrong_values_are_named(flags, wanted):
    with pytest.raises(ConfigError) as error:
        loaded(flags)
    for part in wanted:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("memroy = 1", "unknown field 'memroy'"),
        ("memory = ", "kvstored.toml"),
        ("max_pins = true", "max_pins"),
        ('max_sessions = "many"', "max_sessions"),
        ("namespaces = 3", "namespaces"),
        ("memory = [1]", "memory"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, wanted):
    with pytest.raises(ConfigError, match=wanted):
        loaded(file=write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVSTORED_MEMROY", "KVSTORED_MEMORY"),
        ("KVSTORED_MAX_SESSION", "KVSTORED_MAX_SESSIONS"),
        ("KVSTORED_CONFG", "KVSTORED_CONFIG"),
    ],
)
def test_a_mistyped_variable_is_refused_as_a_mistyped_field_of_the_file_is(name, nearest):
    with pytest.raises(ConfigError) as error:
        loaded(environ={name: "2GiB", "HOME": "/"})
    assert f"{name} (environment)" in str(error.value) and str(error.value).endswith(f" {nearest}")
    assert loaded(environ={name: ""}).unread == ()  # empty is not given, as for a field


def test_a_variable_that_resembles_no_field_is_somebody_elses():
    kubernetes = [  # a service called kvstored
        "PORT", "PORT_9464_TCP", "PORT_9464_TCP_ADDR", "PORT_9464_TCP_PORT", "PORT_9464_TCP_PROTO",
        "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_METRICS",
    ]  # fmt: skip
    names = {f"KVSTORED_{name}" for name in [*kubernetes, "MODEL_DIR", "VERSION", "HOME"]}
    found = loaded(environ={**dict.fromkeys(names, "1"), "KVSTORED_FAULTS": "x", "KVSTORED_MAX_PINS": "64"})
    assert set(found.unread) == names and found.config.max_pins == 64


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="/nonexistent"):
        loaded(file="/nonexistent")


TABLES = """
memory = "64MiB"
disk = ["/tmp/d"]
disk_quota = "100MiB"
[namespaces.default]
memory = 0.75
writers = ["alice", "@llm"]
[namespaces.batch]
disk_quota = "10MiB"
readers = [1000]
salt = "generated"
"""


def test_namespaces_from_tables_and_from_one_line_are_the_same(tmp_path):
    line = "default=0.75:writers=alice+@llm,batch:disk_quota=10MiB:readers=1000:salt=generated"
    flags = {"memory": "64MiB", "disk": "/tmp/d", "disk_quota": "100MiB", "namespaces": line}
    from_file, from_text = loaded(file=write(tmp_path, TABLES)).config, loaded(flags).config
    assert from_file == from_text
    assert (from_text.capacity_bytes("default"), from_text.capacity_bytes("batch")) == (48 << 20, 16 << 20)
    assert from_text.blocks_of("default") + from_text.blocks_of("batch") == from_text.all_blocks
    assert (from_text.disk_bytes("default"), from_text.disk_bytes("batch")) == (90 << 20, 10 << 20)
    assert from_text.open_to_others and not loaded().config.open_to_others
    shares = loaded(file=write(tmp_path, 'memory = "64MiB"\n[namespaces]\ndefault = 0.75\nbatch = 0.25\n'))
    assert shares.config.capacity_bytes("batch") == 16 << 20


def test_a_part_of_the_memory_may_be_a_size():
    config = loaded({"memory": "64MiB", "namespaces": "a=16MiB,b=0.25,c"}).config
    assert [config.capacity_bytes(name) >> 20 for name in "abc"] == [16, 16, 32]
    assert config.disk_bytes("a") == 0


def test_what_nobody_claimed_of_the_disk_is_divided_as_the_memory_is():
    config = loaded(
        {
            "memory": "64MiB",
            "disk": "/tmp/d,/tmp/e",
            "disk_quota": "100MiB",
            "namespaces": "a=0.25:disk_quota=0.2,b=0.5,c",
        }
    ).config
    assert [config.disk_bytes(name) for name in "abc"] == [20 << 20, (80 << 20) * 2 // 3, (80 << 20) // 3]
    assert config.disk == ("/tmp/d", "/tmp/e")


def test_a_blank_behind_a_comma_is_no_part_of_a_directory():
    flags = {"disk": " /tmp/d, /tmp/e ,", "disk_quota": "100MiB"}
    assert load(flags, {"KVSTORED_DIR": "/tmp/x"}).config.disk == ("/tmp/d", "/tmp/e")
    named = {"disk": ["/tmp/ d"], "disk_quota": "100MiB"}  # in a file a name is what it is
    assert load(named, {"KVSTORED_DIR": "/tmp/x"}).config.disk == ("/tmp/ d",)


def test_entries_show_each_namespace_as_the_file_would_say_it(tmp_path):
    found = loaded(file=write(tmp_path, TABLES))
    values = {entry["name"]: (entry["value"], entry["source"]) for entry in found.entries()}
    assert values["namespaces.default"] == ('{ memory = 0.75, writers = ["alice", "@llm"] }', "file")
    assert values["namespaces.batch"] == (
        '{ disk_quota = "10MiB", readers = ["1000"], salt = "generated" }',
        "file",
    )
    shown = "\n".join(f"{namespace.name} = {namespace.shown()}" for namespace in found.config.namespaces)
    again = f'memory = "64MiB"\ndisk = ["/tmp/d"]\ndisk_quota = "100MiB"\n[namespaces]\n{shown}\n'
    assert loaded(file=write(tmp_path, again)).config == found.config


SECRET = "correct horse battery"


def test_a_salt_is_never_shown(tmp_path):
    file = write(tmp_path, f'[namespaces.default]\nsalt = "text:{SECRET}"\n')
    os.chmod(file, 0o640)
    found = loaded(file=file)
    assert found.config.namespaces[0].salt == f"text:{SECRET}"
    assert SECRET not in str(found.entries()) + repr(found) + str(found.config)
    assert "text:***" in str(found.entries())


@pytest.mark.parametrize(
    ("text", "mode", "wanted"),
    [
        (f'salt = "text:{SECRET}"', 0o644, "chmod o-r"),
        (f'salt = "{SECRET}"', 0o600, "generated"),
        (f'salt = "text:{SECRET}"\ncolour = 3', 0o600, "colour"),
        ('salt = "text:short"', 0o600, "5 bytes"),
    ],
)
def test_a_wrong_salt_is_named_and_not_repeated(tmp_path, text, mode, wanted):
    file = write(tmp_path, f"[namespaces.default]\n{text}\n")
    os.chmod(file, mode)
    with pytest.raises(ConfigError, match=wanted) as error:
        loaded(file=file)
    assert SECRET not in str(error.value) and SECRET not in str(error.value.__cause__)


def test_a_salt_on_the_command_line_is_refused():
    with pytest.raises(ConfigError, match="others can read a command line") as error:
        loaded({"namespaces": "a:salt=text:correct_horse"})
    assert "correct_horse" not in str(error.value)
    assert loaded({"namespaces": "a:salt=file:/etc/salt"}).config.namespaces[0].salt == "file:/etc/salt"


def test_the_state_directory_is_systemds_or_the_runtime_directory():
    assert loaded().config.state_dir == "/tmp/x"
    assert loaded(environ={"STATE_DIRECTORY": "/var/lib/kvstored:/b"}).config.state_dir == "/var/lib/kvstored"
    assert loaded({"state_dir": "/s"}).config.state_dir == "/s"


def test_shares_never_add_up_to_more_than_the_memory():
    config = loaded({"memory": "100MiB", "namespaces": "a=0.33,b=0.33,c"}).config
    assert sum(config.capacity_bytes(name) for name in "abc") <= config.memory


def test_max_blocks_follows_the_memory_within_bounds():
    assert loaded({"memory": "8MiB"}).config.all_blocks == 1024
    assert loaded({"memory": "4GiB"}).config.all_blocks == 65536
    assert loaded({"memory": "4TiB"}).config.all_blocks == 1 << 20
    assert loaded({"memory": "4TiB", "max_blocks": "77"}).config.all_blocks == 77


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded().config.memory = 1


def test_the_directory_comes_from_the_environment_first():
    assert default_dir({"KVSTORED_DIR": "/tmp/k", "XDG_RUNTIME_DIR": "/tmp/u"}) == "/tmp/k"


def test_the_directory_of_a_user_is_under_xdg_runtime_dir(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    assert default_dir({"XDG_RUNTIME_DIR": "/tmp/u"}) == "/tmp/u/kvstored"
    with pytest.raises(ConfigError, match="KVSTORED_DIR"):
        default_dir({})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("512m", 512 << 20),
        (7, 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "4GiB4", "0x10", "1e9", "-1", True, None])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 3 << 20, 5 << 30, (1 << 40) + 1, 7 << 40])
def test_a_printed_size_reads_back_the_same(size):
    assert parse_size(format_size(size)) == size


def test_sizes_and_times_for_people():
    assert [approximate_size(n) for n in (5, 1536, 123 << 20, 1 << 40)] == [
        "5 B",
        "1.5 KiB",
        "123 MiB",
        "1 TiB",
    ]
    assert [format_duration(s) for s in (0.25, 61, 3700, 200000)] == ["0.2s", "1m 1s", "1h 1m", "2d 7h"]


@pytest.mark.parametrize(
    "text",
    [
        "max_sessions = " + "9" * 10_000,
        "memory = 0x" + "f" * 9000,
        "max_blocks = 0x" + "f" * 9000,
        "[namespaces.a]\nmemory = " + "9" * 400,
        "memory = " + "[" * 100_000,
        "# " + "x" * MAX_FILE_BYTES,
    ],
)
def test_a_file_beyond_measure_is_a_wrong_file(tmp_path, text):
    with pytest.raises(ConfigError) as wrong:
        loaded(file=write(tmp_path, text))
    assert len(str(wrong.value)) < 500


def test_a_pipe_is_no_file(tmp_path):
    """It would hold up a daemon that reads its file again."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)  # so that opening it waits for nobody
    try:
        os.write(opened, b"max_sessions = 3\n")
        with pytest.raises(ConfigError, match="is a pipe"):
            load({"dir": "/tmp/x"}, {}, str(path))
        salted = load({"dir": "/tmp/x", "namespaces": f"default:salt=file:{path}"}, {}, None).config
        with pytest.raises(StartupError, match=r"the salt of 'default': .* is a pipe"):
            tenants.tenants(salted)
    finally:
        os.close(opened)


@pytest.mark.parametrize("name", ["KVSTORED_DISK", "KVSTORED_NAMESPACES", "KVSTORED_DIR", "XDG_RUNTIME_DIR"])
def test_an_environment_that_is_no_utf8_is_refused(name, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"UTF-8|namespaces"):
        load({}, {"XDG_RUNTIME_DIR": "/tmp", name: "/tmp/\udcff"})


def test_a_cluster_alone_names_the_node_and_listens_on_loopback():
    config = loaded({"cluster": "etcd://10.0.0.8:2379,10.0.0.9:2379/prod"}).config
    assert config.node and config.listen.on_loopback and config.listen.port == 0
    with pytest.raises(ConfigError, match="etcd://HOST:PORT"):
        loaded({"cluster": "etcd://10.0.0.8:2379,/prod"})
    with pytest.raises(ConfigError, match="the least is"):
        loaded({"cluster": "etcd://10.0.0.8:2379", "cluster_memory": "1MiB"})
