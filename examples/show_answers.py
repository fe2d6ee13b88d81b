"""Print the answers beside their questions, `+` before those that hold the expected words and `-` before the others.

Usage: python show_answers.py questions.csv answers.results.jsonl
"""

import csv
import json
import sys
from pathlib import Path


def main(questions: Path, answers: Path) -> None:
    with questions.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with answers.open(encoding="utf-8") as file:
        results = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, file)}
    right = 0
    print("+ holds the expected words, - does not\n")
    for row in rows:
        result = results.get(row["id"])
        if result is None:
            print(f"- {row['question']}\n    no answer; see the error file")
            continue
        answer = " ".join(result["choices"][0]["message"]["content"].split())
        # `expected` holds the ways to write the right answer, with | between them.
        holds = any(way.lower() in answer.lower() for way in row["expected"].split("|"))
        right += holds
        print(f"{'+' if holds else '-'} {row['question']}\n    {answer}")
    print(f"\n{right} of {len(rows)} answers hold the expected words.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
