"""A chat with a server, answers as they come, with nothing but Python's own library.

    ckdist serve -m smollm2 &
    python examples/chat_client.py "Why is the sky blue?"
    echo "And at night?" | python examples/chat_client.py

The `openai` package, or any other client of OpenAI's API, works as well: `base_url="http://127.0.0.1:8080/v1"`.
"""

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator


def answer(url: str, messages: list[dict[str, str]], max_tokens: int, key: str | None) -> Iterator[str]:
    """The pieces of the next answer: the server sends one event a line, the last is [DONE]."""
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
    parser.add_argument("question", nargs="*", help="default: one for each line of the input")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", help="of --api-key")
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
        messages.append({"role": "assistant", "content": said})  # the server keeps the prefix of a chat, not the chat


if __name__ == "__main__":
    main()
