"""The shipped files for systemd, Docker and Kubernetes: they are run as far as possible, and names and times fit the
server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from serving import reserved_port

import cpmrt
from cpmrt.cli import serve as serve_command
from cpmrt.server.api import Endpoints

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = Path(cpmrt.__file__).parent / "deploy"
COMMAND = [sys.executable, "-m", "cpmrt", "serve"]
SMALL = ["--executor", "reference", "--max-context", "256", "--max-sequences", "1"]


def options(arguments: list[str]) -> argparse.Namespace:
    """Return the options that `cpmrt serve` parses from its arguments."""
    parser = argparse.ArgumentParser()
    serve_command.configure(parser)
    return parser.parse_args(arguments)


def paths() -> set[str]:
    return {route.path for route in Endpoints(None).routes()}


def unit() -> dict[str, str]:
    lines = (DEPLOY / "cpmrt.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def manifests() -> dict[str, dict]:
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(h|m|s|)", text).groups()
    return int(number) * {"h": 3600, "m": 60}.get(unit, 1)


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    # The program that it starts need not be installed here.
    text = (DEPLOY / "cpmrt.service").read_text().replace("/opt/cpmrt/bin/cpmrt", sys.executable)
    (tmp_path / "cpmrt.service").write_text(text)
    done = subprocess.run([program, "verify", tmp_path / "cpmrt.service"], capture_output=True, text=True, timeout=60)
    assert "cpmrt.service" not in done.stderr, done.stderr


def test_the_units_command_and_times_fit_the_server():
    settings = unit()
    program, command, *arguments = shlex.split(settings["ExecStart"])
    assert command == "serve" and Path(program).name == "cpmrt"
    assert seconds(settings["TimeoutStopSec"]) > options(arguments).grace + 2
    assert settings["Type"] == "notify" and settings["Restart"] == "on-failure" and settings["User"] != "root"


@pytest.mark.all
def test_systemd_is_told_when_the_server_is_ready_alive_and_ending(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        process = subprocess.Popen(
            [*COMMAND, "--port", "0", *SMALL], stderr=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
        )  # fmt: skip
        try:
            messages = []
            while not messages or messages.count("WATCHDOG=1") < 2 or not any("READY=1" in each for each in messages):
                messages.append(manager.recv(4096).decode())
            process.send_signal(signal.SIGTERM)
            while not messages[-1].startswith("STOPPING=1\n"):
                messages.append(manager.recv(4096).decode())
            assert process.wait(20) == 0
        finally:
            process.kill()
    ready = next(message for message in messages if "READY=1" in message)
    assert re.fullmatch(r"READY=1\nSTATUS=serving cpmrt-demo at http://127\.0\.0\.1:\d+", ready)


def test_the_image_runs_as_an_ordinary_user_with_a_health_check():
    names = [name for name, _ in instructions()]
    values = dict(instructions())
    assert values["USER"] not in ("root", "0") and names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :], "what needs root comes first"
    assert all(image.split()[0].endswith("-slim") for name, image in instructions() if name == "FROM")
    copied = [source for name, value in instructions() if name == "COPY" and "--from" not in value
              for source in value.split()[:-1]]  # fmt: skip
    assert all((ROOT / source).exists() for source in copied), copied
    extras = dict(instructions())["ARG"].partition("=")[2].split(",")
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert set(extras) <= declared


@pytest.mark.all
def test_the_steps_of_the_image_build_an_installation(tmp_path):
    """The image's build steps give an installation that works, with packages of this environment in place of an
    index."""
    sources, wheels, site = tmp_path / "src", tmp_path / "wheels", tmp_path / "site"
    sources.mkdir()
    for name, value in instructions():
        if name == "COPY" and "--from" not in value:
            for source in value.split()[:-1]:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, sources / source)
    build, install, _ = [value for name, value in instructions() if name == "RUN"]
    pip = f"{sys.executable} -m pip --disable-pip-version-check"

    def run(step, folder):
        step = step.replace("/wheels", str(wheels)).replace("pip ", f"{pip} ", 1)
        done = subprocess.run(["sh", "-ec", step], cwd=folder, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "EXTRAS": "server"})  # fmt: skip
        assert done.returncode == 0, done.stderr

    run(build.replace("--no-deps", "--no-deps --no-build-isolation --no-index"), sources)
    run(install.replace("--no-cache-dir", f"--no-deps --no-index --target {site}"), tmp_path)
    assert not wheels.exists(), "they do not stay in the image"
    code = "import cpmrt; print(cpmrt.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(site)), done.stderr
    assert (site / "cpmrt" / "kernels_cu").is_dir() and (site / "cpmrt" / "deploy" / "nginx.conf").is_file()


@pytest.mark.all
def test_the_entry_point_becomes_healthy():
    values = dict(instructions())
    entry = json.loads(values["ENTRYPOINT"])
    check = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    with reserved_port() as port:
        check = [sys.executable, *(word.replace("8000", str(port)) for word in check[1:])]
        entry = [*COMMAND, *(word.replace("8000", str(port)) for word in entry[2:]), *SMALL]
        assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=20).returncode != 0
        process = subprocess.Popen(entry, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(check, stderr=subprocess.DEVNULL, timeout=20).returncode != 0:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_the_manifests_fit_the_schema_of_kubernetes():
    validation = pytest.importorskip("kubernetes_validate")
    for manifest in manifests().values():
        validation.validate(manifest, "1.30", strict=True)


def test_the_manifests_fit_the_server_and_the_image():
    found, image = manifests(), dict(instructions())
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    arguments = options(container["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths()
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live", "a model that loads is no reason to restart"
    (port,) = container["ports"]
    assert str(port["containerPort"]) == image["EXPOSE"]
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > waits + arguments.grace + 2
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == image["USER"]
    labels = pod["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels == found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in paths()
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert image["VOLUME"] in mounted and container["securityContext"]["readOnlyRootFilesystem"]
    variables = dict(setting.split("=") for name, value in instructions() if name == "ENV" for setting in value.split())
    folders = [variables["HF_HOME"], variables["CPMRT_CACHE_DIR"]]
    assert all(folder.startswith(image["VOLUME"] + "/") for folder in folders), "nothing else can be written"
