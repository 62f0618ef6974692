"""A user of stock TRL without a callback: a vLLM server, TRL that asks it for rollouts, and a sidecar that reads them.

PACELINE=speculation.toml python tests/engine/trl_sidecar.py OUT STEPS       OUT/engine.json is written last
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from paceline import assets
from paceline.integrations.engine_wire import EngineWire, http_rpc
from serving import API_SERVER, TRL_FLAGS, served

HOST = Path(__file__).with_name("trl_host.py")
POLICY = assets.policy("small")


def main(out: Path, num_steps: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    words = ["--rollouts", out / "rollouts", "--policy", POLICY, "--policy", out, "--out", out / "drafter"]
    environ = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with served([*API_SERVER, POLICY, *TRL_FLAGS], env=environ, log=out / "server.log") as url:
        command = [sys.executable, "-m", "paceline.cli", "sidecar", "--server", url, "--metrics", out / "sidecar.jsonl"]
        sidecar = subprocess.Popen([*command, *words])
        try:
            subprocess.run([sys.executable, HOST, "--server", url, "--steps", num_steps, "--out", out], check=True)
        finally:
            sidecar.send_signal(signal.SIGTERM)
            code = sidecar.wait(300)
        assert code == 0, "the sidecar has failed"
        counters = EngineWire(http_rpc(url)).counters()
    (out / "engine.json").write_text(json.dumps(counters))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
