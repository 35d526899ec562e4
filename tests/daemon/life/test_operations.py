"""What operators are told is true: the metrics of docs/operations.md are those a daemon exports, every query
of the dashboard and of the alerts asks for what there is, every state and alert has its row.

Method: a real daemon with everything on, used through each door, is scraped; documents, dashboard and rules
are parsed and compared with it. promtool (Debian: prometheus) judges syntax where it is: .ci/run fetches it.
"""

import ast
import contextlib
import json
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from kvstored.config.config import Config
from kvstored.config.namespaces import Namespace
from kvstored.process import limits
from kvstored.telemetry.problems import STATES
from tests.daemon.grpc_calls import CALL_S, Calls

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs/operations.md"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/kvstored.json"
OF_PROMETHEUS = {"instance", "job", "le"}  # labels that a scrape adds, and a histogram's own
LABELS = {"namespace", "operation", "method", "status", "state", "version", "le", "peer", "owner"}
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
BRACES, NAME = r"\{([^}]*)\}", r"(kvstored_\w+|up)\b"


@pytest.fixture
def scraped(daemon, tmp_path):
    """What a used daemon exports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    salt = tmp_path / "salt"
    salt.write_text("a salt of this test")
    salt.chmod(0o600)
    args = ["--metrics-port", str(port), "--node", "a", "--listen", "127.0.0.1:0", "--peer", "b=127.0.0.1:9"]
    args += ["--namespaces", f"default:salt=file:{salt}:share=read"]
    args += ["--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB"]
    (shared := tmp_path / "shared").mkdir(mode=0o700)
    args += ["--disk-shared", str(shared), "--cluster", "etcd://127.0.0.1:9", "--cluster-memory", "16MiB"]
    kvstored = daemon("64MiB", args)
    with Calls(kvstored.dir) as calls:
        calls.put("a")
        calls.get("a", "b")
    with kvstored.connect() as client:
        client.stats()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=CALL_S) as reply:
        return reply.read().decode()


def test_it_needs_the_descriptors_that_the_document_says():
    text = DOCUMENT.read_text()
    itself, each = map(int, re.search(r"- (\d+) for itself and (\d+) a namespace;", text).groups())
    tier, directory = map(
        int, re.search(r"in each namespace, (\d+) more and (\d+) a directory", text).groups()
    )

    def needed(namespaces, disks=0):
        names = tuple(Namespace(f"n{number}", 1 / namespaces) for number in range(namespaces))
        disk = tuple(f"/disk/{number}" for number in range(disks))
        return limits._own_descriptors(
            Config(dir="/x", namespaces=names, disk=disk, disk_quota=len(disk) << 30)
        )

    assert needed(1) == itself - 3 + each, "three are its standard input, output and error"
    assert needed(4) - needed(1) == 3 * each
    assert needed(2, disks=3) - needed(2) == 2 * (tier + 3 * directory)


def samples(text):
    """Sample name -> the labels it has."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


def types(text):
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))


def documented():
    """Metric -> (type, labels), from the table."""
    rows = re.findall(r"^\| `(kvstored_\w+)` \| (\w+) \| ([\w, ]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: (kind, set(filter(None, labels.split(", ")))) for name, kind, labels in rows}


def test_every_exported_metric_is_documented_and_every_documented_one_exported(scraped):
    kinds, with_labels = types(scraped), samples(scraped)
    found = {
        name: (kind, with_labels[name + "_bucket" * (kind == "histogram")] - {"le"})
        for name, kind in kinds.items()
    }
    assert found == documented()


def test_no_label_is_of_a_tenant(scraped):
    assert set().union(*samples(scraped).values()) <= LABELS


def asked(query):
    """(sample, label names in its selector) of a PromQL expression."""
    for name, braces in re.findall(rf"{NAME}(?:{BRACES})?", query):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', braces)))


def alerts():
    """Alert -> (expression, the annotation "what")."""
    text = ALERTS.read_text()
    blocks = re.split(r"^      - alert: ", text, flags=re.MULTILINE)[1:]
    found = {}
    for block in blocks:
        expression = re.search(r"^        expr: (?:>-\n)?(.*?)(?=^        \w+:)", block, re.M | re.S)[1]
        found[block.split("\n")[0]] = expression, re.search(r'what: "(.*)"', block)[1]
    return found


def dashboard_queries():
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [annotation["expr"] for annotation in board["annotations"]["list"]]
    variables = board["templating"]["list"]
    return queries + [variable["definition"] for variable in variables if variable["type"] == "query"]


def test_every_query_asks_for_what_is_exported(scraped):
    there = samples(scraped) | {"up": set()}
    queries = dashboard_queries() + [expression for expression, _ in alerts().values()]
    assert len(queries) > 40
    wrong = []
    for query in queries:
        names = list(asked(query))
        assert names, query
        for name, labels in names:
            if name not in there:
                wrong.append(f"{name} is not exported: {query}")
            elif not labels <= there[name] | OF_PROMETHEUS:
                wrong.append(f"{name} has no label {labels - there[name] - OF_PROMETHEUS}: {query}")
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", query)
        for label in {name.strip() for group in grouped for name in group.split(",")} - OF_PROMETHEUS:
            if not any(label in there[name] for name, _ in names):
                wrong.append(f"nothing has the label {label}: {query}")
    assert not wrong, "\n".join(wrong)
    assert list(asked('rate(kvstored_x{a="b",c!~"d=1"}[5m])')) == [("kvstored_x", {"a", "c"})]


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    queries = "\n".join([*dashboard_queries(), *(expression for expression, _ in alerts().values())])
    unseen = {name for name in documented() if not re.search(rf"\b{name}(_bucket|_count|_sum)?\b", queries)}
    # Of little use in a picture: how often a configuration was applied.
    assert unseen <= {"kvstored_config_reloads_total"}


def test_every_thread_of_ours_has_the_name_that_is_documented(daemon, tmp_path, wait_until):
    named = {
        name
        for source in (ROOT / "native/core").rglob("*.cc")
        for name in re.findall(r'pthread_setname_np\(.*"(.*)"\)', source.read_text())
    }
    assert named == set(re.findall(r"`(kv-\w+)`", DOCUMENT.read_text()))
    kvstored = daemon("64MiB", ["--disk", str(tmp_path / "disk"), "--disk-quota", "64MiB"])

    def threads():
        found = set()
        for task in list(Path(f"/proc/{kvstored.pid}/task").iterdir()):
            with contextlib.suppress(OSError):  # ended meanwhile
                found.add((task / "comm").read_text().strip())
        return found

    wait_until(lambda: {"kv-sessions", "kv-disk"} <= threads(), "they have named themselves")
    running = threads()
    assert {name for name in running if name.startswith("kv")} <= named, running


def trouble():
    section = DOCUMENT.read_text().split("## When something is wrong")[1]
    return {name.strip("`") for name in re.findall(r"^\| (`?[\w ,]+`?) \|", section, re.MULTILINE)}


def test_every_state_and_every_alert_has_its_row():
    rows = trouble()
    assert set(STATES) <= rows
    assert {what for _, what in alerts().values() if not what.startswith("{{")} <= rows
    assert {name for name in rows if "_" in name} <= set(STATES), "a state that does not exist"


def test_what_a_reload_changes_is_documented():
    tree = ast.parse((ROOT / "kvstored/server.py").read_text())
    (function,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_allow_changes")
    words = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant)}
    fields = words & set(Config.__dataclass_fields__)
    assert len(fields) >= 5
    (section,) = re.findall(r"^### Reload$.*?(?=^###? )", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert fields == {name for name in re.findall(r"`(\w+)`", section) if name in Config.__dataclass_fields__}


def promtool(*words, text=None):
    return subprocess.run(
        ["promtool", *map(str, words)], input=text, capture_output=True, text=True, timeout=60
    )


@needs_promtool
def test_prometheus_accepts_the_rules_and_they_fire_as_they_should():
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("test", "rules", ALERTS.with_name("alerts_test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_accepts_the_metrics_and_the_dashboard(scraped, tmp_path):
    done = promtool("check", "metrics", text=scraped)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(dashboard_queries())
        if not query.startswith("label_values")
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
