"""An OpenAI batch, from upload to answers. Nothing in it is about promptmill: with another base URL it runs elsewhere.

    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=pm-...
    python examples/openai_batch.py --model smollm2-135m-instruct "What is a heron?" "Why is the sky blue?"

Needs the `openai` package alone. Exit code: 0 the batch was completed, 1 it was not.
"""

import argparse
import io
import json
import sys
import time

from openai import OpenAI

FINAL = ("completed", "failed", "expired", "cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("questions", nargs="+")
    options = parser.parse_args()

    client = OpenAI()
    lines = [
        {
            "custom_id": f"question-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": options.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": options.max_tokens,
                "temperature": 0,
            },
        }
        for number, question in enumerate(options.questions, start=1)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    file = client.files.create(file=("questions.jsonl", io.BytesIO(content.encode())), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"from": "an example"}
    )
    print(f"{batch.id} reads {file.id} ({file.bytes} bytes)")

    shown = ""
    while batch.status not in FINAL:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        now = f"{batch.status}, {counts.completed} of {counts.total} answered, {counts.failed} failed" if counts else ""
        if now != shown:
            print(now)
            shown = now
    for error in (batch.errors.data or []) if batch.errors else []:
        print(f"line {error.line}: {error.code}: {error.message}")

    answers = {}
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for row in client.files.content(file_id).text.splitlines():
            answer = json.loads(row)
            answers[answer["custom_id"]] = answer
    for line, question in zip(lines, options.questions, strict=True):
        answer = answers.get(line["custom_id"])
        if answer is None:
            continue
        print(f"\n+ {question}")
        if answer["response"] is None:
            print(f"  never run: {answer['error']['message']}")
        elif answer["response"]["status_code"] != 200:
            print(f"  refused: {answer['response']['body']['error']['message']}")
        else:
            print(f"  {answer['response']['body']['choices'][0]['message']['content'].strip()}")
    if batch.usage:
        print(f"\n{batch.usage.input_tokens} tokens read, {batch.usage.output_tokens} written")
    return 0 if batch.status == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
