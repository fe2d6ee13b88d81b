"""What the CUDA engine and its peer are given: prompts as token ids, and how long the answers are to be."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.template import CONTEXT_SEPARATOR
from workers.models.artifact import Artifact
from workers.models.description import ModelDescription
from workers.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTIONS = "questions"
_ASKED = 2048
_LONGEST_ANSWER = 64


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each is answered with: exactly, or at most where an answer may end with a token."""

    description: str
    prompts: list[list[int]]
    new_tokens: list[int]
    stop_token_ids: tuple[int, ...] = ()

    def check(self, answers: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError where an answer is longer than it may be, or shorter without a reason."""
        for answer, most in zip(answers, self.new_tokens, strict=True):
            assert len(answer) == most or (self.stop_token_ids and len(answer) < most), f"{len(answer)} of {most}"


def make_workload(name: str, model: ModelDescription, seed: int, artifact: Artifact | None = None) -> Workload:
    """One of the workloads that docs/benchmarks.md names. artifact: whose tokenizer `questions` are written with."""
    rng = random.Random(f"{name} {seed}")  # no workload may find another's prompts in the prefix cache

    def tokens(count: int) -> list[int]:
        return [rng.randrange(5, model.vocab_size) for _ in range(count)]

    match name:
        case "W1":
            return Workload("512 x (128 prompt, 64 new)", [tokens(128) for _ in range(512)], [64] * 512)
        case "W2":
            shared = tokens(1024)
            prompts = [shared + tokens(64) for _ in range(512)]
            return Workload("512 x (1024 shared + 64 prompt, 64 new)", prompts, [64] * 512)
        case "W2-odd":
            shared = tokens(1000)
            prompts = [shared + tokens(64) for _ in range(512)]
            return Workload("512 x (1000 shared + 64 prompt, 64 new)", prompts, [64] * 512)
        case "W3":
            return Workload("256 x (1024 prompt, 128 new)", [tokens(1024) for _ in range(256)], [128] * 256)
        case "W4":
            lengths = random.Random(0)
            sizes = [(log_uniform(lengths, 32, 2048), log_uniform(lengths, 8, 512)) for _ in range(512)]
            prompts = [tokens(prompt) for prompt, _ in sizes]
            return Workload("512 x (32-2048 prompt, 8-512 new)", prompts, [new for _, new in sizes])
        case "one":
            return Workload("1 x (128 prompt, 64 new)", [tokens(128)], [64])
        case "small":
            return Workload("2048 x (128 prompt, 64 new)", [tokens(128) for _ in range(_ASKED)], [64] * _ASKED)
        case "questions" if artifact is not None:
            return _questions(artifact, seed, rng)
        case _:
            raise SystemExit(f"no workload {name}" + (" without --artifact" if name == QUESTIONS else ""))


def _questions(artifact: Artifact, seed: int, rng: random.Random) -> Workload:
    """The questions of examples/, each asked of some sections of the handbook in some order, until the model ends.

    The sections come as `promptmill run --context` places them. Many prompts begin with the same section, as they do
    where passages are looked up for each question.
    """
    handbook = (EXAMPLES / "handbook.md").read_text(encoding="utf-8")
    sections = ["## " + section.strip() for section in handbook.split("\n## ")[1:]]
    with (EXAMPLES / "questions.csv").open(encoding="utf-8", newline="") as file:
        questions = [row["question"] for row in csv.DictReader(file)]
    tokenizer = Tokenizer(artifact)
    prompts = []
    for number in range(_ASKED):
        context = CONTEXT_SEPARATOR.join([f"# Handbook, edition {seed}", *rng.sample(sections, rng.choice((1, 2, 3)))])
        question = questions[number % len(questions)]
        prompts.append(
            tokenizer.encode_chat([{"role": "system", "content": context}, {"role": "user", "content": question}])
        )
    return Workload(
        f"{_ASKED} questions ({min(map(len, prompts))}-{max(map(len, prompts))} prompt, up to {_LONGEST_ANSWER} new)",
        prompts,
        [_LONGEST_ANSWER] * _ASKED,
        artifact.tokenizer.stop_token_ids,
    )


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
