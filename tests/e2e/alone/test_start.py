"""A model that cannot be served: the reason, once, and the end, from `interpose serve` and from Serve's own tools."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.service import RunningService, clean_environment, wait_for

# Deploys a model as Serve's own tools do, waits until Serve gives up, and prints what it says of the model.
DEPLOY = """
import os, sys, time
from serve_app.environment import own_head_environment
os.environ.update(own_head_environment())
from ray import serve
from serve_app.app import build_model
from serve_app.cluster import OwnHead

head = OwnHead(1)
head.start()
try:
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(build_model({"model": sys.argv[1], "name": "missing"}), name="app", route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and serve.status().applications["app"].status != "DEPLOY_FAILED":
        time.sleep(0.5)
    application = serve.status().applications["app"]
    print(application.status.value, *(one.message for one in application.deployments.values()))
    serve.shutdown()
finally:
    head.stop()
"""


def test_an_engine_that_cannot_load_says_why_once_and_stops(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints["llama"], broken)
    config = json.loads((broken / "config.json").read_text())
    # Files as they should be, of another model than the configuration's: only loading the weights shows it.
    config["intermediate_size"] *= 2
    (broken / "config.json").write_text(json.dumps(config))
    model = {"name": "broken", "model": str(broken), "engine": {"dtype": "float32"}}
    service = RunningService(tmp_path, {"models": [model]})
    try:
        wait_for(service.ended, 300)
    finally:
        status = service.stop()
    assert status == 1, service.output
    assert service.output.count("broken cannot start: ") == 1, service.output
    [reason] = [line for line in service.output.splitlines() if "cannot start" in line]
    assert reason.startswith("interpose serve: broken cannot start: loading the model in the workers, worker 0: "), (
        reason
    )
    assert "See root cause above" not in service.output and "Traceback" not in service.output
    begun = [line for line in service.output.splitlines() if "starting workers and loading the model" in line]
    assert begun and not any(
        "looking for the model's files" in line for line in service.output.partition(begun[-1])[2:]
    )


def test_with_serves_own_tools_the_deployment_fails_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEPLOY, str(tmp_path / "missing")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DEPLOY_FAILED"), done.stdout
    assert f"there is no folder {tmp_path / 'missing'}" in done.stdout
