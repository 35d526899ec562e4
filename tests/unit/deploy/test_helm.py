"""Proves that the Helm chart is the kustomization with words for what differs from cluster to cluster.

Method: helm and kubectl themselves, which `.ci/helm` fetches; skipped where it cannot. With its own values
the chart renders what `kubectl kustomize` does. With other values Kubernetes' schemas and the programs'
parsers take what it renders, and what the chart does not know is refused.
"""

import json
import shutil
import subprocess

import pytest

from tests.unit.deploy.manifests import (
    DEPLOY,
    KUBERNETES,
    KUBERNETES_VERSION,
    ROOT,
    documents,
    entry,
    taken,
    yaml,
)

CHART = DEPLOY / "helm"


@pytest.fixture(scope="module")
def tools():
    where = ROOT / "build/tools/kubernetes"  # of .ci/helm, which .ci/run calls
    found = {name: shutil.which(name) or shutil.which(name, path=str(where)) for name in ("helm", "kubectl")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"not here: {', '.join(missing)} (.ci/helm fetches them)")
    return found


@pytest.fixture
def helm(tools, tmp_path):
    """`helm(*words)`: what it did, with a home of its own."""

    def run(*words):
        command = [tools["helm"], *map(str, words)]
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)

    return run


@pytest.fixture
def rendered(helm, tmp_path):
    """`rendered(values)`: its objects by kind."""

    def render(values=None):
        path = tmp_path / "values.json"
        path.write_text(json.dumps(values or {}))
        done = helm("template", "kvstored", CHART, "--namespace", "kvstored", "--values", path)
        assert done.returncode == 0, done.stderr
        return {thing["kind"]: thing for thing in yaml.safe_load_all(done.stdout) if thing}

    return render


def without_labels(thing):
    """Without what helm adds to an object's name."""
    labels = {key: value for key, value in thing["metadata"].get("labels", {}).items() if key == "app"}
    kept = {key: value for key, value in thing["metadata"].items() if key != "labels"}
    return {**thing, "metadata": {**kept, **({"labels": labels} if labels else {})}}


def pod(thing):
    return thing["spec"]["template"]["spec"]


def test_its_own_values_are_the_kustomization(tools, helm, rendered):
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0 and "[ERROR]" not in done.stdout and "[WARNING]" not in done.stdout, (
        done.stdout
    )
    command = [tools["kubectl"], "kustomize", str(KUBERNETES)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    wanted = {thing["kind"]: thing for thing in yaml.safe_load_all(built)}
    del wanted["Namespace"]  # `helm install --create-namespace` makes it
    assert {kind: without_labels(thing) for kind, thing in rendered().items()} == wanted


def test_other_values_are_taken_by_kubernetes_and_by_the_programs(rendered):
    validate = pytest.importorskip("kubernetes_validate", reason="deploy: pip install kubernetes-validate")
    somewhere = {"nodeSelector": {"pool": "llm"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    changed = rendered({
        "socketDirectory": "/var/run/kv",
        "daemon": {"memoryGiB": 100, "extraArgs": ["--metrics-port", "9464"], **somewhere},
        "server": {"keysSecret": "", "replicas": 5, "modelName": "a model: 'x'", "modelClaim": "smol",
                   "extraArgs": ["--kv-codec", "int8"], **somewhere},
    })  # fmt: skip
    for thing in changed.values():
        validate.validate(thing, KUBERNETES_VERSION, strict=True)
    daemon, server = pod(changed["DaemonSet"]), pod(changed["Deployment"])
    assert daemon["containers"][0]["resources"]["limits"]["memory"] == f"{100 * 1024 + 512}Mi"
    for name, spec in (("daemon", daemon), ("server", server)):
        words = taken([*entry(name), *spec["containers"][0]["args"]])
        assert spec["nodeSelector"] == {"pool": "llm"} and spec["tolerations"] == somewhere["tolerations"]
        assert spec["volumes"][0]["hostPath"]["path"] == "/var/run/kv"
    assert words.served_model_name == "a model: 'x'" and words.api_key_file is None
    assert "keys" not in {volume["name"] for volume in server["volumes"]}
    assert changed["Deployment"]["spec"]["replicas"] == 5
    assert set(rendered({"server": {"enabled": False}})) == {"DaemonSet"}


WRONG = [
    {"deamon": {}},
    {"daemon": {"memory": "8GiB"}},
    {"daemon": {"memoryGiB": 0}},
    {"server": {"replicas": "two"}},
    {"socketDirectory": "run"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_the_chart_does_not_know_is_refused(helm, tmp_path, wrong):
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    done = helm("template", "kvstored", CHART, "--values", tmp_path / "wrong.json")
    assert done.returncode != 0 and "specifications of the schema" in done.stderr


def test_it_is_packed_whole_and_its_version_is_the_programs(helm, tmp_path):
    import kvstored

    chart = documents(CHART / "Chart.yaml")[0]
    assert chart["version"] == chart["appVersion"] == kvstored.__version__
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("*.tgz")
    done = helm("template", "other", packed)
    assert done.returncode == 0 and "kind: DaemonSet" in done.stdout
    images = documents(KUBERNETES / "kustomization.yaml")[0]["images"]
    assert {image["newTag"] for image in images} == {kvstored.__version__}
