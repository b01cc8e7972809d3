"""llm: two prompts of one conversation on its command line."""

import os
import pathlib
import subprocess
import sys
import tempfile

gateway, key, name = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    models = pathlib.Path(folder) / "extra-openai-models.yaml"
    models.write_text(
        f"- model_id: {name}\n  model_name: {name}\n  api_base: {gateway}/v1\n"
        "  api_key_name: cresset\n"
    )
    command = [str(pathlib.Path(sys.executable).parent / "llm")]
    environment = {**os.environ, "LLM_USER_PATH": folder}

    def run(*arguments):
        subprocess.run([*command, *arguments], env=environment, check=True, timeout=120)

    run("keys", "set", "cresset", "--value", key)
    run("-m", name, "-o", "max_tokens", "8", "Hello")
    run("-m", name, "-c", "--no-stream", "-o", "max_tokens", "8", "And again")
print("ok")
