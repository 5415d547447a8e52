"""One turn of real coding agents against a server of ours: Codex, Claude Code, qwen-code, opencode.

    npm install --prefix DIR @openai/codex @anthropic-ai/claude-code @qwen-code/qwen-code opencode-ai
    unshare -rn sh -c 'ip link set lo up; python benchmarks/agent_clients.py DIR [--seconds 300] [--only codex,claude]'

It serves SmolLM2 (`ckdist pull smollm2`) on 127.0.0.1 and runs every agent of DIR/node_modules once, each in a home of
its own, with its telemetry and updates off; in a network namespace as above it reaches nothing but the server. The
model is small: what it says makes no sense, and where it goes on until the context is full the agent may call its turn
failed. Printed are each agent's exit code and time, which of its requests were answered with which status, the end of
its answer, and what the server's log says of fields and tools that it left out.
"""

import argparse
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

MODEL = "smollm2"
QUESTION = "Say hello."
START_SECONDS, STOP_SECONDS = 120.0, 30.0
SHOWN = 120  # characters of an answer
CODEX = """model = "{model}"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


@dataclass
class Agent:
    """`program`: under node_modules. `files`: of its home, by name; {url} and {model} are filled in."""

    program: str
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])


# Claude Code's own prompt and tools have 17,000 tokens, more than the model's 8192, so it gets a short one.
AGENTS = {
    "codex": Agent(
        "@openai/codex/bin/codex.js",
        ["exec", "--skip-git-repo-check", QUESTION],
        {"CODEX_HOME": "{home}"},
        {"config.toml": CODEX},
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code-linux-x64/claude",
        ["-p", QUESTION, "--tools", "Bash", "--system-prompt", "You are brief."],
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CONFIG_DIR": "{home}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        },
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code/cli.js",
        [
            "--auth-type",
            "openai",
            "--bare",
            "--system-prompt",
            "You are brief.",
            "--core-tools",
            "read_file",
            "-p",
            QUESTION,
        ],
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        {
            ".qwen/settings.json": json.dumps(
                {
                    "privacy": {"usageStatisticsEnabled": False},
                    "telemetry": {"enabled": False},
                    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                    "model": {"generationConfig": {"samplingParams": {"max_tokens": 256}}},
                }
            )
        },
    ),
    "opencode": Agent(
        "opencode-linux-x64/bin/opencode",
        ["run", "--model", f"local/{MODEL}", QUESTION],
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        {
            ".config/opencode/opencode.json": json.dumps(
                {
                    "autoupdate": False,
                    "share": "disabled",
                    "provider": {
                        "local": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                            "models": {MODEL: {"limit": {"context": 8192, "output": 256}}},
                        }
                    },
                }
            )
        },
    ),
}


def main() -> None:
    """Runs the agents that are there."""
    parser = argparse.ArgumentParser(description="One turn of real coding agents")
    parser.add_argument("folder", type=pathlib.Path, help="where npm has installed the agents")
    parser.add_argument("--seconds", type=float, default=300.0, help="of one agent at most")
    parser.add_argument("--only", default=",".join(AGENTS), help="names of agents, with commas between")
    given = parser.parse_args()
    modules = given.folder.resolve() / "node_modules"
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        scratch = pathlib.Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        url, log = f"http://127.0.0.1:{port}", scratch / "log"
        server = start_server(port, url, log)
        try:
            for agent in given.only.split(","):
                if (modules / AGENTS[agent].program).exists():
                    run(agent, modules, scratch / agent, url, log, given.seconds)
                else:
                    print(f"{agent}: not in {modules}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(STOP_SECONDS)


def start_server(port: int, url: str, log: pathlib.Path) -> subprocess.Popen[bytes]:
    """A server that answers."""
    command = [sys.executable, "-m", "ckdist.cli.main", "serve", "-m", MODEL, "--port", str(port), "--ctx-size", "8192"]
    with log.open("wb") as file:
        server = subprocess.Popen([*command, "--parallel", "2"], stderr=file, stdout=file)
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return server
        except httpx.TransportError:
            pass
        if time.monotonic() > end or server.poll() is not None:
            sys.exit(f"the server does not start: {log.read_text()[-500:]}")
        time.sleep(0.2)


def run(name: str, modules: pathlib.Path, home: pathlib.Path, url: str, log: pathlib.Path, seconds: float) -> None:
    """One turn of one agent, and what came of it."""
    agent, before, told = AGENTS[name], answered(url), len(log.read_text())
    work = home / "work"
    work.mkdir(parents=True)
    fill = {"{url}": url, "{home}": str(home), "{model}": MODEL}
    for file, text in agent.files.items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(filled(text, fill))
    path = modules / agent.program
    command = [*(["node"] if path.suffix == ".js" else []), str(path), *agent.arguments]
    system = {"PATH": f"{pathlib.Path('/usr/bin')}:/bin:/usr/local/bin", "HOME": str(home), "TERM": "dumb"}
    variables = {key: filled(value, fill) for key, value in agent.variables.items()}
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            command, cwd=work, env=system | variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
        )
        code, said = str(ended.returncode), (ended.stdout or ended.stderr).decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        code, said = "none", ""
    requests = {key: count - before.get(key, 0) for key, count in answered(url).items()}
    shown = ", ".join(f"{path} {status} × {count:.0f}" for (path, status), count in requests.items() if count)
    print(f"{name}: exit {code}, {time.monotonic() - begun:.0f} s; {shown or 'no requests'}")
    print(f"    {' '.join(said.split())[-SHOWN:]!r}")
    for line in log.read_text()[told:].splitlines():
        print(f"    {line[:SHOWN]}")


def filled(text: str, values: dict[str, str]) -> str:
    """`text` with the server's address and the agent's home."""
    for key, value in values.items():
        text = text.replace(key, value)
    return text


def answered(url: str) -> dict[tuple[str, str], float]:
    """How many requests each path has answered with each status, but for those of this program."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("requests_total")]
    found = {(s.labels.get("path", ""), s.labels.get("status", "")): s.value for s in samples if "path" in s.labels}
    return {key: value for key, value in found.items() if key[0] not in ("/metrics", "/health")}


if __name__ == "__main__":
    main()
