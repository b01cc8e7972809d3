"""aider: one message without a repository."""

import os
import pathlib
import subprocess
import sys
import tempfile

gateway, key, name = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    command = [str(pathlib.Path(sys.executable).parent / "aider"), "--model", f"openai/{name}"]
    switches = (
        "--no-git --yes-always --no-show-model-warnings --no-check-update --analytics-disable"
    )
    environment = {
        **os.environ,
        "HOME": folder,
        "OPENAI_API_BASE": f"{gateway}/v1",
        "OPENAI_API_KEY": key,
    }
    done = subprocess.run(
        [*command, *switches.split(), "--chat-mode", "ask", "--message", "Say hello."],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "Tokens:" in done.stdout, done
print("ok")
