"""Proves that what operators install is what the programs take: manifests valid, flags known, files there.

Method: Kubernetes' own schemas (kubernetes-validate), the programs' own parsers on every argument, systemd's
own verdict. `make containers` builds and runs images where podman or docker is; no test does.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.unit.deploy.manifests import (
    CONTAINERS,
    DEPLOY,
    KUBERNETES,
    KUBERNETES_VERSION,
    ROOT,
    documents,
    entry,
    taken,
    workloads,
    yaml,
)


def test_workflows_call_make_targets_that_there_are():
    root = DEPLOY.parent
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    paths = (root / ".github/workflows").glob("*.yml")
    flows = {path.name: yaml.safe_load(path.read_text()) for path in paths}
    assert set(flows) == {"ci.yml", "release.yml"}
    for flow in flows.values():
        assert flow["permissions"] == {"contents": "read"}
        for job in flow["jobs"].values():
            assert job["runs-on"].startswith("ubuntu-")
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                if "run" in step:
                    make, target, *_ = step["run"].split()
                    assert make == "make" and target in targets, step


def test_kubernetes_takes_every_manifest():
    validate = pytest.importorskip("kubernetes_validate", reason="deploy: pip install kubernetes-validate")
    names = documents(KUBERNETES / "kustomization.yaml")[0]["resources"]
    assert {path.name for path in KUBERNETES.glob("*.yaml")} == {*names, "kustomization.yaml"}
    for document in (document for name in names for document in documents(KUBERNETES / name)):
        validate.validate(document, KUBERNETES_VERSION, strict=True)
    wrong = workloads()[0]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, KUBERNETES_VERSION, strict=True)


def test_the_programs_take_the_flags_they_are_given():
    compose = documents(CONTAINERS / "compose.yaml")[0]["services"]
    daemon, server = (workload["spec"]["template"]["spec"]["containers"][0] for workload in workloads())
    for start, args in (("daemon", daemon["args"]), ("daemon", compose["daemon"]["command"]),
                        ("server", server["args"]), ("server", compose["server"]["command"])):  # fmt: skip
        assert taken([*entry(start), *args])
    assert taken(daemon["livenessProbe"]["exec"]["command"])
    assert taken(compose["daemon"]["healthcheck"]["test"][1:])
    with pytest.raises(SystemExit):
        taken([*entry("server"), "--no-such-flag"])


def test_no_container_is_root_or_can_write_its_root_and_none_has_the_hosts_ipc():
    for pod in (workload["spec"]["template"]["spec"] for workload in workloads()):
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
        assert pod["enableServiceLinks"] is False, "a Service's variables begin as the programs' own"
        for container in pod["containers"]:
            context = {**pod["securityContext"], **container["securityContext"]}
            assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"]
            assert context["capabilities"]["drop"] == ["ALL"] and "memory" in container["resources"]["limits"]
    for name in ("daemon", "server"):
        assert "USER 10001" in (CONTAINERS / f"{name}.Containerfile").read_text()
        assert documents(CONTAINERS / "compose.yaml")[0]["services"][name]["read_only"]


def test_what_compose_mounts_is_there_and_its_ports_are_on_loopback():
    services = documents(CONTAINERS / "compose.yaml")[0]["services"]
    for service in services.values():
        for mount in service.get("volumes", ()):
            if mount.startswith("."):
                assert (CONTAINERS / mount.split(":")[0]).exists(), mount
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    jobs = documents(CONTAINERS / "prometheus.yml")[0]["scrape_configs"]
    assert "kvstored" in {job["job_name"] for job in jobs}, "the alerts ask for up{job=kvstored}"


def test_systemd_accepts_the_servers_unit(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    for name in ("kvstored", "kvclient-serve"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environ = {"DESTDIR": str(tmp_path / "root"), "PATH": "/usr/bin:/bin"}
    subprocess.run([DEPLOY / "systemd/install", tmp_path / "kvstored"], check=True, env=environ)
    units = tmp_path / "root/etc/systemd/system"
    both = [units / "kvstored.service", units / "kvclient-serve.service"]
    done = subprocess.run(["systemd-analyze", "verify", *both], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user, who can install nothing")
def test_what_the_unit_could_not_start_is_not_installed(request):
    """The program lies where the unit sees it, and its Python does not."""
    seen, hidden = (Path(tempfile.mkdtemp(dir=place)) for place in ("/dev/shm", "/var/tmp"))
    for place in (seen, hidden):
        request.addfinalizer(lambda place=place: shutil.rmtree(place))
        place.chmod(0o755)

    def refused(program, first):
        program.write_text(first)
        program.chmod(0o755)
        done = subprocess.run(
            ["sh", "-s", program], stdin=(DEPLOY / "systemd/install").open(), capture_output=True, text=True,
            user=65534, env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr

    (hidden / "python").touch(0o755)
    (seen / "python").symlink_to(hidden / "python")
    assert f"hides it ({hidden}/python)" in refused(seen / "kvstored", f"#!{seen}/python -P\n")
    assert "root is needed" in refused(seen / "kvstored", "#!/usr/bin/env python3\n")
    assert "letters, digits and" in refused(seen / "a b", "")


def test_the_servers_unit_lets_it_have_its_gpu_and_write_what_it_compiles():
    """Without them --device auto takes the processor, and Triton fails at its first kernel."""
    lines = (DEPLOY / "systemd/kvclient-serve.service.in").read_text().splitlines()
    assert "DeviceAllow=char-nvidia* rw" in lines and "PrivateDevices=yes" not in lines
    (cache,) = (line.partition("TRITON_CACHE_DIR=")[2] for line in lines if "TRITON_CACHE_DIR=" in line)
    (owned,) = (line.removeprefix("CacheDirectory=") for line in lines if line.startswith("CacheDirectory="))
    assert cache.startswith(f"/var/cache/{owned}/")


def test_no_image_is_built_from_what_git_ignores():
    def patterns(name):
        return {line for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"}

    def said(line):  # git's pattern without a slash inside is met at any depth
        return line.strip("/") if line.startswith("/") else f"**/{line.strip('/')}"

    assert {said(line) for line in patterns(".gitignore")} | {".git"} == patterns(".dockerignore")
