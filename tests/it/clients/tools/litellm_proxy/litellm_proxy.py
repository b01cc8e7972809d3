"""LiteLLM's proxy before the gateway, asked by openai for Python."""

import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import openai

gateway, key, name = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with tempfile.TemporaryDirectory() as folder:
    config = pathlib.Path(folder) / "config.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {name}\n    litellm_params:\n"
        f"      model: openai/{name}\n      api_base: {gateway}/v1\n      api_key: {key}\n"
        "litellm_settings:\n  drop_params: true\n"
        "general_settings:\n  master_key: sk-of-the-proxy\n"
    )
    command = str(pathlib.Path(sys.executable).parent / "litellm")
    proxy = subprocess.Popen(
        [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    )
    try:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}", api_key="sk-of-the-proxy", max_retries=0
        )
        hello = [{"role": "user", "content": "Hello"}]
        for attempt in range(90):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                time.sleep(1)
        said = client.chat.completions.create(model=name, messages=hello, max_tokens=8)
        assert said.usage.completion_tokens >= 1, said
        stream = client.chat.completions.create(
            model=name, messages=hello, max_tokens=8, stream=True
        )
        assert len(list(stream)) >= 1
        said = client.completions.create(model=name, prompt="Hello", max_tokens=8)
        assert said.choices[0].finish_reason in ("stop", "length"), said
    finally:
        proxy.terminate()
        proxy.wait(30)
print("ok")
