"""Streams whose texts show whether an engine that has ended was continued exactly."""

import json
import threading

import httpx

BODIES = (
    {"prompt": "def main(", "temperature": 0},
    {"prompt": "The sky is", "temperature": 1, "seed": 7, "logprobs": 2},
    {"prompt": "x", "temperature": 1, "seed": 3, "guided_regex": "[a-z ]{150,300}"},
)


def streamed(url, body, started: threading.Event | None = None) -> tuple[str, list]:
    """The text and the log probabilities of a stream."""
    text, scores = "", []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                text += event["choices"][0]["text"]
                scores.append(event["choices"][0]["logprobs"])
                if started is not None:
                    started.set()
    return text, [score for part in scores if part for score in part["token_logprobs"]]
