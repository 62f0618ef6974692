"""The arena as a task for the loop."""

from __future__ import annotations

from paceline.arena import task
from paceline.run.task import Task, Tokenizer, make_prompt


def arena_task(tokenizer: Tokenizer, *, seed: int, num_heldout: int) -> Task:
    """Fresh problems without end, and the same held-out problems for every seed."""

    def prompt_of(problem: task.Problem):
        return make_prompt(problem.id, problem.prompt, {"answer": problem.answer}, tokenizer)

    return Task(
        prompts=map(prompt_of, task.problems(seed)),
        heldout=[prompt_of(problem) for problem in task.heldout(num_heldout)],
        reward=task.reward,
    )
