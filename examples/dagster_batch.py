"""A pipeline with Dagster: expands a data set with a teacher model, every night at two.

    DATA=questions.jsonl MODEL=smollm2 dagster asset materialize -f examples/dagster_batch.py --select '*'

A line of DATA is {"id": ..., "question": ...}. OUT (default: out) gets requests, answers and counts. A run that was
stopped goes on: `ckdist batch` skips the requests that have an answer.
"""

import json
import os
import pathlib
import subprocess

import dagster

OUT = pathlib.Path(os.environ.get("OUT", "out"))
VARIANTS = 2  # answers to each question
SAMPLING = {"max_tokens": int(os.environ.get("MAX_TOKENS", "256")), "temperature": 0.8}


@dagster.asset
def requests() -> dagster.MaterializeResult:
    """Several requests for each question, with seeds of their own."""
    OUT.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in pathlib.Path(os.environ["DATA"]).read_text().splitlines()]
    with open(OUT / "requests.jsonl", "w") as file:
        for row in rows:
            for seed in range(VARIANTS):
                body = {"messages": [{"role": "user", "content": row["question"]}], "seed": seed, **SAMPLING}
                line = {"custom_id": f"{row['id']}-{seed}", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
    return dagster.MaterializeResult(metadata={"requests": len(rows) * VARIANTS})


@dagster.asset(deps=[requests], retry_policy=dagster.RetryPolicy(max_retries=3, delay=10))
def answers() -> dagster.MaterializeResult:
    """The teacher's answers. A retry continues where the run before it stopped."""
    model = ["-m", os.environ["MODEL"]] if "MODEL" in os.environ else []
    command = ["ckdist", "batch", "-i", OUT / "requests.jsonl", "-o", OUT / "answers.jsonl", *model]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: some requests failed, and are in answers.errors.jsonl
        raise dagster.Failure(done.stderr.strip()[-1000:])
    return dagster.MaterializeResult(metadata={"summary": done.stdout.strip()})


@dagster.asset(deps=[answers])
def counts() -> dagster.MaterializeResult:
    """Numbers of answers and of their tokens."""
    found = [json.loads(line)["response"]["body"] for line in (OUT / "answers.jsonl").read_text().splitlines()]
    numbers = {"answers": len(found), "tokens": sum(one["usage"]["completion_tokens"] for one in found)}
    (OUT / "counts.json").write_text(json.dumps(numbers))
    return dagster.MaterializeResult(metadata=numbers)


job = dagster.define_asset_job("expand", selection="*")
nightly = dagster.ScheduleDefinition(job=job, cron_schedule="0 2 * * *")
defs = dagster.Definitions(assets=[requests, answers, counts], schedules=[nightly])
