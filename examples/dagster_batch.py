"""A pipeline with Dagster: expands a data set with a teacher model overnight, and counts what it got.

    pip install dagster
    DATA=questions.jsonl MODEL=smollm2 dagster asset materialize -f examples/dagster_batch.py --select '*'

A line of DATA is {"id": ..., "question": ...}. OUT (default: out) gets requests.jsonl, answers.jsonl and counts.json.
A run that was stopped goes on: `ckdist batch` skips the requests that have an answer. `dagster dev -f
examples/dagster_batch.py` shows the same pipeline in a browser, and runs it every night at two.
"""

import json
import os
import pathlib
import subprocess

import dagster

OUT = pathlib.Path(os.environ.get("OUT", "out"))
VARIANTS = 2  # answers to each question
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "256"))


@dagster.asset
def requests() -> dagster.MaterializeResult:
    """Several requests for each question, with seeds of their own."""
    OUT.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in pathlib.Path(os.environ["DATA"]).read_text().splitlines() if line.strip()]
    lines = []
    for row in rows:
        for variant in range(VARIANTS):
            body = {
                "messages": [{"role": "user", "content": row["question"]}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0.8,
                "seed": variant,
            }
            name = f"{row['id']}-{variant}"
            lines.append({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
    (OUT / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return dagster.MaterializeResult(metadata={"requests": len(lines)})


@dagster.asset(deps=[requests], retry_policy=dagster.RetryPolicy(max_retries=3, delay=10))
def answers() -> dagster.MaterializeResult:
    """The teacher's answers. A retry continues where the run before it stopped."""
    model = ["-m", os.environ["MODEL"]] if os.environ.get("MODEL") else []
    command = ["ckdist", "batch", "-i", str(OUT / "requests.jsonl"), "-o", str(OUT / "answers.jsonl"), *model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some requests failed, and are in answers.errors.jsonl
        raise dagster.Failure(done.stderr.strip()[-1000:])
    return dagster.MaterializeResult(metadata={"summary": done.stdout.strip()})


@dagster.asset(deps=[answers])
def counts() -> dagster.MaterializeResult:
    """Numbers of answers, of answers that were cut off, and of tokens."""
    found = [json.loads(line)["response"]["body"] for line in (OUT / "answers.jsonl").read_text().splitlines()]
    numbers = {
        "answers": len(found),
        "cut": sum(one["choices"][0]["finish_reason"] == "length" for one in found),
        "tokens": sum(one["usage"]["completion_tokens"] for one in found),
    }
    (OUT / "counts.json").write_text(json.dumps(numbers))
    return dagster.MaterializeResult(metadata=numbers)


nightly = dagster.ScheduleDefinition(job=dagster.define_asset_job("expand", selection="*"), cron_schedule="0 2 * * *")
defs = dagster.Definitions(assets=[requests, answers, counts], schedules=[nightly])
