"""A chat with a server: streams answers with only Python's standard library.

    ckdist serve -m smollm2 &
    python examples/chat_client.py "Why is the sky blue?"
    echo "And at night?" | python examples/chat_client.py

The `openai` package and other clients of OpenAI's API work too: `base_url="http://127.0.0.1:8080/v1"`.
"""

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator


def answer(url: str, messages: list[dict[str, str]], max_tokens: int, key: str | None) -> Iterator[str]:
    """Yields the pieces of the next answer. The server sends one event per line; the last one is [DONE]."""
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as events:
        for line in events:
            text = line.decode().strip().removeprefix("data: ")
            if text == "[DONE]":
                return
            if text:
                yield json.loads(text)["choices"][0]["delta"].get("content") or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="*", help="default: each line of standard input")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", help="API key of the server")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    messages: list[dict[str, str]] = []
    for question in args.question or sys.stdin:
        messages.append({"role": "user", "content": question.strip()})
        said = ""
        for piece in answer(args.url, messages, args.max_tokens, args.key):
            print(piece, end="", flush=True)
            said += piece
        print()
        messages.append({"role": "assistant", "content": said})  # the server caches the prefix, but stores no chat


if __name__ == "__main__":
    main()
