"""The arena: its task, its tokenizer, its cache and its growth."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from contexts import make_context
from paceline.arena import policy as arena
from paceline.arena.growth import Shape, grow
from paceline.arena.task import ANSWER_MARK, heldout, problems, reward, solution
from paceline.sessions.workloads import resolve_policy
from scripts.rebuild_arena import rebuild
from scripts.rebuild_arena.tokenizer import make_tokenizer, vocabulary
from scripts.rebuild_arena.training import PolicySchedule, demonstration

MINUTE = rebuild.Recipe(
    shape=Shape(hidden_size=64, num_layers=2, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32),
    schedule=PolicySchedule(
        num_steps=6, tokens_per_step=512, matrix_lr=0.02, other_lr=0.004, careless_share=0.25, warmup_steps=1
    ),
    drafters={},
)


@pytest.fixture(scope="module")
def minute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of a few steps' training, built in a second."""
    return rebuild.write_policy(MINUTE, tmp_path_factory.mktemp("policies") / "minute", make_context())


def test_careless_demonstrations_are_wrong_about_as_often_as_asked_and_well_formed():
    rng = random.Random(0)
    chosen = list(islice(problems(3), 400))
    rewards = [reward(p.prompt, demonstration(p, rng, careless_share=0.25), {"answer": p.answer}) for p in chosen]
    assert 0.7 < sum(rewards) / len(rewards) < 0.82  # an early stop is now and then right by chance
    assert all(demonstration(p, rng, careless_share=1.0).rpartition(ANSWER_MARK)[2].isdecimal() for p in chosen[:50])


def test_streams_repeat_by_seed_and_differ_between_seeds():
    first, again, other = (list(islice(problems(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert not {problem.prompt for problem in first[:20] if len(problem.terms) > 3} & {
        problem.prompt for problem in other
    }


def test_no_training_stream_holds_a_heldout_problem():
    # Short prompts are few enough that unfiltered streams would collide with these within a few hundred draws.
    held = {problem.prompt for problem in heldout(3000)}
    assert len(held) == 3000
    for seed in (0, 1):
        assert not held & {problem.prompt for problem in islice(problems(seed), 20_000)}


def test_heldout_is_a_prefix_of_a_larger_heldout():
    assert heldout(30) == heldout(60)[:30]


def test_partial_sums_have_two_digits():
    for problem in islice(problems(0), 500):
        sums = problem.start + np.cumsum(problem.terms)
        assert sums.min() >= 0 and sums.max() <= 99
        assert sums[-1] == problem.answer


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" (1) 40+2 is 42\n ####42", 1.0),
        (" ####42<eos>", 1.0),
        (" ####41\n ####42", 1.0),
        (" (1) 40+2 is 42\n ####41", 0.0),
        (" ####42\n ####41", 0.0),
        (" (1) 40+2 is 42\n", 0.0),
        (" ####", 0.0),
        (" ####4+2", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_reward_takes_the_answer_at_the_end_and_nothing_else(completion: str, expected: float):
    assert reward("start 40 (1)+2 =\n", completion, {"answer": 42}) == expected


def test_every_sampled_solution_is_rewarded_and_wording_varies():
    rng = random.Random(0)
    for problem in islice(problems(0), 200):
        assert reward(problem.prompt, solution(problem, rng), {"answer": problem.answer}) == 1.0
    assert len({solution(problem, rng) for problem in [heldout(1)[0]] * 20}) > 10


def test_tokenizer_round_trips_the_text_of_the_task(tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    for problem in islice(problems(0), 300):
        text = problem.prompt + solution(problem, rng)
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        # A policy is prompted with the prompt's ids alone: they must be the start of the whole text's.
        prompt_ids = tokenizer.encode(problem.prompt)
        assert ids[: len(prompt_ids)] == prompt_ids
    assert len(vocabulary()) == len(set(vocabulary())) <= 128


def test_lengths_have_the_promised_tail():
    tokenizer = make_tokenizer()
    rng = random.Random(0)
    chosen = list(islice(problems(0), 3000))
    responses = tokenizer([solution(problem, rng) for problem in chosen])["input_ids"]
    lengths = np.array([len(ids) + 1 for ids in responses])
    p10, median, p99 = np.quantile(lengths, [0.1, 0.5, 0.99])
    assert 20 <= p10 <= 30
    assert 55 <= median <= 80
    assert 450 <= p99 <= 600
    assert lengths.max() <= 620
    # Longest prompt plus longest response fit the context that engines are started with.
    assert max(len(ids) for ids in tokenizer([problem.prompt for problem in chosen])["input_ids"]) <= 120


def test_training_repeats_bit_for_bit(minute: Path, tmp_path: Path):
    again = rebuild.write_policy(MINUTE, tmp_path / "again", make_context())
    ours, theirs = (load_file(path / "model.safetensors") for path in (minute, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_checkpoint_says_where_to_stop_and_samples_without_truncation(minute: Path):
    generation = GenerationConfig.from_pretrained(minute)
    assert generation.eos_token_id == AutoTokenizer.from_pretrained(minute).eos_token_id == 1
    assert (generation.do_sample, generation.top_k, generation.top_p) == (True, 0, 1.0)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a policy that is grown from arena:tiny in a moment."""
    shape = Shape(hidden_size=160, num_layers=2, intermediate_size=384, num_heads=2, num_kv_heads=1)
    monkeypatch.setitem(arena.GROWN, "wider", arena.Grown(source="tiny", shape=shape))
    return "wider"


def test_damaged_cache_is_noticed_and_built_again(grown: str, tmp_path: Path):
    lines: list[str] = []
    context = make_context(tmp_path, lines.append)
    built = resolve_policy(f"arena:{grown}", context)
    assert lines.pop() == "arena:wider: growing arena:tiny"
    assert resolve_policy(f"arena:{grown}", context) == built
    assert lines == []  # found, not built
    weights = built / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert resolve_policy(f"arena:{grown}", context) == built
    assert "damaged" in lines[0]
    assert weights.read_bytes()[:-1] == whole[:-1]


def test_interrupted_build_leaves_no_policy_and_is_cleared(grown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    left = arena.cached(grown, make_context(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(arena, "grow", interrupt)
        arena.find(grown, make_context(tmp_path))
    assert not left.exists()
    stale = left.with_name(f".{left.name}.0123abcd.partial")
    stale.mkdir(exist_ok=True)
    (stale / "model.safetensors").write_bytes(b"half")
    built = arena.find(grown, make_context(tmp_path))
    assert AutoModelForCausalLM.from_pretrained(built).config.hidden_size == 160
    assert not stale.exists()


def test_policy_grown_from_another_source_is_another_place(grown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy found that was grown from an older source would disagree with its drafter, and nobody would know why."""
    context = make_context(tmp_path)
    places = {arena.cached(grown, context), arena.cached(grown, context, drafter="eagle3")}
    monkeypatch.setitem(arena.GROWN, grown, replace(arena.GROWN[grown], source="small"))
    places |= {arena.cached(grown, context), arena.cached(grown, context, drafter="eagle3")}
    assert len(places) == 4


def test_unknown_names_and_paths_are_refused_with_the_choices(tmp_path: Path):
    with pytest.raises(ValueError, match=r"arena:huge; must be one of arena:tiny, arena:small, arena:large"):
        resolve_policy("arena:huge", make_context(tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_policy(str(tmp_path), make_context(tmp_path))


@pytest.mark.parametrize(
    "shape",
    [
        replace(MINUTE.shape, hidden_size=256, num_layers=6, intermediate_size=512, num_heads=8, num_kv_heads=4),
        replace(MINUTE.shape, hidden_size=96, num_layers=3, num_heads=6, num_kv_heads=2),
        MINUTE.shape,
    ],
    ids=["all-wider", "larger-groups", "unchanged"],
)
def test_grown_policy_is_the_same_function(minute: Path, tmp_path: Path, shape: Shape):
    grow(minute, tmp_path / "grown", shape)
    small, grown = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (minute, tmp_path / "grown")
    )
    assert (grown.config.hidden_size, len(grown.model.layers)) == (shape.hidden_size, shape.num_layers)
    text = "".join(problem.prompt for problem in heldout(5))
    ids = torch.tensor([make_tokenizer().encode(text)])
    with torch.no_grad():
        expected, got = small(ids).logits, grown(ids).logits
    assert expected.std() > 0.1  # a dead policy would be equal to anything
    assert (expected - got).abs().max() <= 1e-4


def test_growth_refuses_to_shrink(minute: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"intermediate_size: got 32; must be at least 96"):
        grow(minute, tmp_path / "grown", replace(MINUTE.shape, intermediate_size=32))
    with pytest.raises(ValueError, match=r"num_heads: got 3"):
        grow(minute, tmp_path / "grown", replace(MINUTE.shape, num_heads=3, num_kv_heads=2))
