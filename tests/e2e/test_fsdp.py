"""Two FSDP2 processes over gloo must do what one process does. This file is also the program that each process runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  public in its docs
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config import CorrectionConfig, LearnerConfig, ObjectiveConfig
from paceline.learner.correction import correct
from paceline.learner.fsdp import FsdpLearner
from paceline.types import Sample

VOCABULARY = 41  # odd, so that the ranks' shards of the embedding differ in size
TRUNCATED = CorrectionConfig(kind="token-tis")


def make_samples(num: int) -> list[Sample]:
    random = np.random.default_rng(0)
    samples = []
    for _ in range(num):
        num_prompt, num_response = int(random.integers(1, 9)), int(random.integers(1, 40))
        samples.append(
            Sample(
                token_ids=random.integers(0, VOCABULARY, num_prompt + num_response).astype(np.int32),
                num_prompt_tokens=num_prompt,
                logp=random.uniform(-6, -1, num_response).astype(np.float32),
                advantage=float(random.normal()),
            )
        )
    return samples


def run_rank(model: Path, out: Path, rank: int, world_size: int, loss: str) -> None:
    """One rank's life; rank by rank the record goes to `out`."""
    config = LearnerConfig(
        dtype="float32", world_size=world_size, microbatch_tokens=90, minibatches=2, learning_rate=1e-3, deadline_s=120
    )
    objective = ObjectiveConfig(loss=loss, clip_high=0.28)  # pyright: ignore[reportArgumentType]
    learner = FsdpLearner(
        model,
        config,
        objective,
        temperature=0.9,
        seed=5,
        rank=rank,
        store=FileStore(str(out / "meeting"), world_size),
        num_threads=1,
    )
    samples = make_samples(7)
    scored = learner.score(samples, taps=(1, 2))
    learner.calibrate(samples[:1], version=0, share=1)  # the second rank sees nothing
    calibrated = learner.calibrate(samples, version=1, share=1)
    learner._accumulate(samples)
    gradients = {name: p.grad.full_tensor() for name, p in learner._scorer.named_parameters()}  # pyright: ignore
    learner._optimizer.zero_grad()
    alone = learner.apply(samples[:1])  # the second rank has nothing to do, and must not leave the first waiting
    learner._config = config.model_copy(update={"minibatches": 1})
    scores = learner.score(samples[:1], correction=TRUNCATED)  # ranks must agree on the id of the gradients
    ahead = learner.apply(correct(samples[:1], scores.logp, TRUNCATED), scores.pending)
    scores = learner.score(samples, correction=TRUNCATED)
    reused = learner.apply(correct(samples, scores.logp, TRUNCATED), scores.pending)
    assert (ahead["policy/gradients_reused"], reused["policy/gradients_reused"]) == (1, 1)
    learner._config = config
    metrics = learner.apply(samples)
    weights = dict(learner.weights(torch.float32))
    rescored = learner.score(samples)
    learner.save(out / "saved")
    save_file(
        {f"gradient.{name}": tensor for name, tensor in gradients.items()} | weights, out / f"rank{rank}.safetensors"
    )
    record = {
        "logp": [x.tolist() for x in scored.logp],
        "entropy": [x.tolist() for x in scored.entropy],
        "rescored": [x.tolist() for x in rescored.logp],
        "states": {i: float(np.abs(state.taps).sum() + np.abs(state.last).sum()) for i, state in scored.states.items()},
        "metrics": metrics,
        "alone": alone,
        "reused": reused,
        "calibrated": {key: value for key, value in calibrated.items() if "scale" in key or "saturated" in key},
    }
    (out / f"rank{rank}.json").write_text(json.dumps(record))
    learner.close()


def run_from_state(model: Path, out: Path, rank: int, world_size: int, state: str) -> None:
    """Load a state if there is one, otherwise make one, and record all of it."""
    config = LearnerConfig(
        dtype="float32", world_size=world_size, microbatch_tokens=90, minibatches=2, learning_rate=1e-3
    )
    learner = FsdpLearner(
        model,
        config,
        ObjectiveConfig(),
        temperature=0.9,
        seed=5,
        rank=rank,
        store=FileStore(str(out / "meeting"), world_size),
        num_threads=1,
    )
    if Path(state).exists():
        learner.load_state(state)
    else:
        learner.apply(make_samples(7))
        learner.save_state(state)

    def everything() -> dict[str, torch.Tensor]:
        found = dict(learner.weights(torch.float32))
        for name, parameter in learner._parameters().items():
            known = learner._optimizer.state[parameter]
            found |= {f"{key}.{name}": known[key].full_tensor() for key in ("exp_avg", "exp_avg_sq")}
            found[f"step.{name}"] = known["step"].clone()
        return found

    save_file(everything(), out / f"loaded{rank}.safetensors")
    learner.apply(make_samples(7))
    save_file(everything(), out / f"updated{rank}.safetensors")
    (out / f"rank{rank}.json").write_text(json.dumps([learner._num_updates, learner._num_steps]))
    learner.close()


def run_group(model: Path, out: Path, world_size: int, loss: str) -> list[dict[str, Any]]:
    out.mkdir()
    processes = [
        subprocess.Popen([sys.executable, __file__, str(model), str(out), str(rank), str(world_size), loss])
        for rank in range(world_size)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def make_model(path: Path) -> Path:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_two_ranks_do_what_one_does(tmp_path: Path, loss: str) -> None:
    """Guards against gradients halved by FSDP2's averaging, normalizers counted per rank, samples scored twice or not
    at all, KV scales of one rank's tokens only, and ranks that drift apart."""
    model = make_model(tmp_path / "model")
    (one,) = run_group(model, tmp_path / "one", 1, loss)
    two = run_group(model, tmp_path / "two", 2, loss)

    for rank in two:
        for key in ("logp", "entropy", "rescored"):
            for expected, actual in zip(one[key], rank[key], strict=True):
                np.testing.assert_allclose(actual, expected, atol=1e-4 if key == "rescored" else 1e-5, err_msg=key)
        for key in ("alone", "reused", "metrics", "calibrated"):
            assert rank[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
    assert two[0]["states"].keys().isdisjoint(two[1]["states"])
    assert two[0]["states"] | two[1]["states"] == pytest.approx(one["states"], rel=1e-4)

    expected = load_file(tmp_path / "one" / "rank0.safetensors")
    initial = load_file(model / "model.safetensors")
    ranks = [load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in range(2)]
    for name, tensor in expected.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], tensor, atol=1e-5, rtol=0)
        if not name.startswith("gradient."):
            assert (tensor - initial[name]).abs().max() > 1e-4, (
                f"{name} was not trained, so the comparison says nothing"
            )
    saved = load_file(tmp_path / "two" / "saved" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, ranks[0][name]), name


@pytest.mark.parametrize("wrote", [1, 2])
def test_a_state_is_the_same_for_any_number_of_ranks(tmp_path: Path, wrote: int) -> None:
    """Guards against shards that are lost, doubled or put in the wrong place when the number of ranks changes."""
    model, state = make_model(tmp_path / "model"), str(tmp_path / "state")
    counted = run_group(model, tmp_path / "first", wrote, state)
    first = {name: load_file(tmp_path / "first" / f"{name}0.safetensors") for name in ("loaded", "updated")}
    for world_size in (1, 2):
        out = tmp_path / f"by{world_size}"
        assert run_group(model, out, world_size, state) == world_size * [counted[0]]
        for rank in range(world_size):
            loaded = load_file(out / f"loaded{rank}.safetensors")
            assert loaded.keys() == first["loaded"].keys() and any(name.startswith("exp_avg_sq.") for name in loaded)
            for name, tensor in loaded.items():
                assert torch.equal(tensor, first["loaded"][name]), name
        updated = load_file(out / "updated0.safetensors")
        for name, tensor in updated.items():
            if world_size == wrote:
                assert torch.equal(tensor, first["updated"][name]), name
            else:  # the cut into micro-batches rounds differently
                torch.testing.assert_close(tensor, first["updated"][name], atol=1e-4, rtol=0)


if __name__ == "__main__":
    program = run_rank if sys.argv[5] in ("token", "sequence") else run_from_state
    program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
