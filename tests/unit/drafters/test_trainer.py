"""Drafter training: packing, isolation, interruption, and the replay that predicts an engine's accepted length."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_cases import KINDS, TAPS, VOCABULARY, make_documents, make_drafter, make_head, policy_config
from paceline.drafters.kinds import guess, new_drafter
from paceline.drafters.packing import Document, make_pack
from paceline.drafters.trainer import (
    DrafterTrainer,
    Schedule,
    State,
    average,
    evaluate,
    expected_verifications,
    trained,
)

CPU = torch.device("cpu")
LENGTHS = [(3, 9), (1, 4), (6, 2), (2, 13), (4, 7)]
SCHEDULE = Schedule(num_steps=4, tokens_per_step=25, pass_tokens=12, draft_length=4, warmup_steps=1, autocast=False)


def gradients(kind: str, packs: list[list[Document]]) -> tuple[float, dict[str, torch.Tensor]]:
    drafter = make_drafter(kind)
    total = 0.0
    for documents in packs:
        guesses = guess(drafter, make_pack(documents, CPU), make_head(), 5)
        guesses.loss.backward()
        total += guesses.loss.item()
    return total, {name: w.grad for name, w in drafter.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_training_equals_unpacked_training(kind: str) -> None:
    """Documents that see one another in a pack learn from text that an engine never shows them."""
    documents = make_documents(LENGTHS)
    packed_loss, packed = gradients(kind, [documents])
    alone_loss, alone = gradients(kind, [[document] for document in documents])
    assert packed_loss == pytest.approx(alone_loss, rel=1e-5)
    assert packed.keys() == alone.keys() and "fc.weight" in packed and "embed_tokens.weight" in packed
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_from_one_document_to_another_or_to_the_policy(kind: str) -> None:
    first, second = make_documents([(3, 9), (2, 6)])
    head_VD = make_head().requires_grad_()
    pack = make_pack([first, second], CPU)
    pack.taps_NKD.requires_grad_()
    pack.last_AD.requires_grad_()
    drafter = make_drafter(kind)
    guesses = guess(drafter, pack, head_VD, 4)
    # The first document's part of the loss, by counting only its anchors.
    alone = make_pack([first], CPU)
    num_first = len(alone.token_N)
    pack.steps_A[len(alone.anchor_A) :] = 0
    loss = guess(drafter, pack, head_VD, 4).loss
    assert loss.item() < guesses.loss.item()
    loss.backward()
    assert pack.taps_NKD.grad is not None
    assert pack.taps_NKD.grad[:num_first].abs().sum() > 0
    assert torch.count_nonzero(pack.taps_NKD.grad[num_first:]) == 0
    assert pack.last_AD.grad is None and head_VD.grad is None, "the policy gets no gradient"
    assert all(weight.grad is None for name, weight in drafter.named_parameters() if name.startswith("verifier_"))


def weights_after(stops: random.Random | None, kind: str = "eagle3") -> dict[str, torch.Tensor]:
    trainer = DrafterTrainer(make_drafter(kind), make_head(), SCHEDULE)
    for seed in range(2):
        trainer.submit(make_documents(LENGTHS, seed=seed))
        while not trainer.run(lambda: stops is not None and stops.random() < 0.6):
            pass
    assert trainer.num_steps == 4
    return {name: weight.detach().clone() for name, weight in trainer.drafter.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_training_that_was_stopped_again_and_again_ends_at_the_same_parameters(kind: str) -> None:
    """A worker that is recalled must not lose the micro-batches of a half-made step, nor count them twice."""
    whole = weights_after(None, kind)
    interrupted = weights_after(random.Random(0), kind)
    for name, weight in whole.items():
        assert torch.equal(weight.nan_to_num(), interrupted[name].nan_to_num()), name


def test_training_goes_on_from_a_saved_state() -> None:
    """Momentum that is forgotten at every lease would make each of them start with a jump."""
    whole = weights_after(None)
    first = DrafterTrainer(make_drafter(), make_head(), SCHEDULE)
    first.submit(make_documents(LENGTHS, seed=0))
    assert first.run(lambda: False)
    second = DrafterTrainer(make_drafter(seed=9), make_head(), SCHEDULE)
    second.load_state_dict(first.state_dict())
    second.submit(make_documents(LENGTHS, seed=1))
    assert second.run(lambda: False)
    for name, weight in second.drafter.state_dict().items():
        assert torch.equal(weight.nan_to_num(), whole[name].nan_to_num()), name


def test_without_an_end_the_mean_of_the_last_steps_counts_and_training_goes_on_from_the_weights() -> None:
    """Weights at a learning rate that never falls are noise around where they should be; a mean that is trained on
    would stand still, and one that a lease forgets would begin anew."""
    schedule = replace(SCHEDULE, num_steps=None)
    whole = DrafterTrainer(make_drafter(), make_head(), schedule)
    weights = [trained(whole.drafter)["fc.weight"].detach().clone()]
    for seed in range(3):
        train_slice(whole, seed, lengths=[(4, 12)])
        weights.append(trained(whole.drafter)["fc.weight"].detach().clone())
    assert whole.num_steps == 3
    mean = torch.lerp(torch.lerp(weights[1], weights[2], 1 / 2), weights[3], 1 / 2)
    torch.testing.assert_close(whole.state_dict()["drafter/fc.weight"], mean)
    leased = DrafterTrainer(make_drafter(), make_head(), schedule)
    for seed in range(3):
        state = leased.state_dict()
        leased = DrafterTrainer(make_drafter(seed=9), make_head(), schedule)
        leased.load_state_dict(state)
        train_slice(leased, seed, lengths=[(4, 12)])
    assert_same(leased.state_dict(), whole.state_dict())


def make_worker(state: State | None = None, *, kind: str = "eagle3") -> DrafterTrainer:
    trainer = DrafterTrainer(make_drafter(kind, seed=0 if state is None else 9), make_head(), SCHEDULE)
    if state is not None:
        trainer.load_state_dict(state)
    return trainer


def train_slice(trainer: DrafterTrainer, seed: int, lengths: list[tuple[int, int]] = LENGTHS) -> None:
    trainer.submit(make_documents(lengths, seed=seed))
    assert trainer.run(lambda: False)


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_that_is_averaged_after_every_slice_is_one_that_never_was(kind: str) -> None:
    """Averaging that forgets momentum or counts would make each slice start with a jump, for nothing."""
    whole = make_worker(kind=kind)
    state = make_worker(kind=kind).state_dict()
    for seed in range(3):
        train_slice(whole, seed)
        worker, idle = make_worker(state, kind=kind), make_worker(state, kind=kind)
        train_slice(worker, seed)
        # One that joined and saw nothing changes nothing.
        state = average([idle.state_dict(), worker.state_dict()], [idle.fresh_tokens, worker.fresh_tokens])
    assert_same(state, whole.state_dict())
    assert whole.num_steps > 3 and any(name.startswith("optimizer/1/") for name in state)


def test_workers_that_saw_the_same_are_their_own_average() -> None:
    start = make_worker().state_dict()
    workers = [make_worker(start) for _ in range(4)]
    for worker in workers:
        train_slice(worker, 5)
    assert_same(average([w.state_dict() for w in workers], [w.fresh_tokens for w in workers]), workers[0].state_dict())


def test_a_worker_counts_by_the_tokens_that_it_has_seen() -> None:
    """A plain mean lets a worker that was recalled after one step undo half of what another learned in a phase."""
    start = make_worker().state_dict()
    few, many = make_worker(start), make_worker(start)
    train_slice(few, 0, [(3, 9)])
    for seed in range(3):
        train_slice(many, seed)
    assert (few.fresh_tokens, many.fresh_tokens) == (12, 3 * sum(map(sum, LENGTHS)))
    share = many.fresh_tokens / (few.fresh_tokens + many.fresh_tokens)
    ours, one, other = (
        state["drafter/fc.weight"]
        for state in (
            average([few.state_dict(), many.state_dict()], [few.fresh_tokens, many.fresh_tokens]),
            few.state_dict(),
            many.state_dict(),
        )
    )
    torch.testing.assert_close(ours, (1 - share) * one + share * other)
    assert (ours - other).norm() < 0.2 * (ours - one).norm()


def test_averaged_momentum_is_that_of_one_worker_on_all_documents() -> None:
    """Where the step is linear in the gradient, which momentum is, workers together equal one worker: exact up to
    rounding."""
    schedule = Schedule(
        num_steps=None, tokens_per_step=10_000, draft_length=3, warmup_steps=1, max_grad_norm=1e9, autocast=False
    )

    def momentum(parts: list[Document]) -> tuple[State, int]:
        trainer = DrafterTrainer(make_drafter(), make_head(), schedule)
        trainer.submit(parts)
        trainer.run(lambda: False)
        state = trainer.state_dict()
        return {name: state[name] for name in state if name.endswith(("exp_avg", "momentum_buffer"))}, trainer.num_steps

    # Of equal numbers of guesses, so that the mean of the means is the mean.
    first, second = make_documents([(3, 9), (3, 9)])
    together, num_steps = momentum([first, second])
    apart = average([momentum([first])[0], momentum([second])[0]], [12, 12])
    assert num_steps == 1 and together.keys() == apart.keys()
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-3, atol=1e-6)


def test_a_worker_that_leaves_in_the_middle_of_a_step_leaves_that_step_behind() -> None:
    """Its half-made gradient must not weigh in the average, nor leak into the next step of whoever goes on."""
    start = make_worker().state_dict()
    worker = make_worker(start)
    worker.submit(make_documents(LENGTHS))
    answers = iter([False, True])
    assert not worker.run(lambda: next(answers))
    with pytest.raises(AssertionError, match="inside an optimizer step"):
        worker.state_dict()
    worker.drop_queue()
    assert worker.fresh_tokens == 0
    left = worker.state_dict()
    assert_same(
        {n: t for n, t in left.items() if n != "num_tokens"}, {n: t for n, t in start.items() if n != "num_tokens"}
    )
    fresh = make_worker(start)
    train_slice(worker, 1)
    train_slice(fresh, 1)
    assert torch.equal(worker.drafter.fc.weight, fresh.drafter.fc.weight)


def test_a_step_that_was_skipped_gives_no_weight_in_the_average() -> None:
    worker = make_worker()
    documents = make_documents([(3, 9)])
    documents[0].taps[0, 0, 0] = np.inf
    worker.submit(documents)
    worker.run(lambda: False)
    assert worker.num_skipped == 1 and worker.fresh_tokens == 0


def test_a_state_goes_through_safetensors(tmp_path: Path) -> None:
    """It crosses processes as a file, and nothing may need pickle for that."""
    worker = make_worker()
    train_slice(worker, 0)
    save_file(worker.state_dict(), tmp_path / "state.safetensors")
    assert_same(make_worker(load_file(tmp_path / "state.safetensors")).state_dict(), worker.state_dict())


def test_a_newer_head_gives_the_targets_from_then_on() -> None:
    """A drafter trained through the first policy's head would learn away from the present one."""
    worker, other = make_worker(), DrafterTrainer(make_drafter(), make_head(7), SCHEDULE)
    worker.set_head(make_head(7))
    train_slice(worker, 0)
    train_slice(other, 0)
    assert_same(worker.state_dict(), other.state_dict())


def test_stopping_is_asked_before_every_micro_batch() -> None:
    trainer = DrafterTrainer(make_drafter(), make_head(), SCHEDULE)
    trainer.submit(make_documents(LENGTHS))
    assert not trainer.run(lambda: True)
    assert trainer.num_tokens == 0
    answers = iter([False, True])
    assert not trainer.run(lambda: next(answers))
    assert 0 < trainer.num_tokens <= SCHEDULE.pass_tokens


def test_the_micro_batches_of_a_step_add_up_to_its_mean() -> None:
    """A mean of means would weigh a pass of one long document like one of many short ones."""
    results = []
    for pass_tokens in (12, 10_000):
        schedule = Schedule(
            num_steps=None, tokens_per_step=10_000, pass_tokens=pass_tokens, warmup_steps=1, autocast=False
        )
        trainer = DrafterTrainer(make_drafter(), make_head(), schedule)
        trainer.submit(make_documents(LENGTHS))
        assert trainer.run(lambda: False) and trainer.num_steps == 1
        results.append(trainer.drafter.lm_head.weight.detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = DrafterTrainer(make_drafter(), make_head(), SCHEDULE)
    documents = make_documents(LENGTHS)
    documents[0].taps[0, 0, 0] = np.inf
    before = trainer.drafter.fc.weight.detach().clone()
    trainer.submit(documents)
    trainer.run(lambda: False)
    assert trainer.num_skipped >= 1
    assert torch.isfinite(trainer.drafter.fc.weight).all()
    assert trainer.num_skipped == trainer.num_steps or not torch.equal(before, trainer.drafter.fc.weight)


def test_training_teaches_eagle_what_follows_each_token() -> None:
    """The target distribution depends on the previous token alone: a drafter must find that."""
    rng = np.random.default_rng(0)
    head_VD = make_head()
    states = rng.standard_normal((VOCABULARY, head_VD.shape[1]), np.float32) * 4
    documents = []
    for document in make_documents([(2, 30)] * 8):
        documents.append(
            Document(
                token_ids=document.token_ids,
                num_prompt_tokens=2,
                taps=document.taps,
                last=states[document.token_ids],
            )
        )
    schedule = Schedule(num_steps=60, tokens_per_step=256, draft_length=3, warmup_steps=2, autocast=False)
    trainer = DrafterTrainer(make_drafter(), head_VD, schedule)
    before = evaluate(trainer.drafter, documents, head_VD, draft_length=3)
    for _ in range(60):
        trainer.submit(documents)
        trainer.run(lambda: False)
    after = evaluate(trainer.drafter, documents, head_VD, draft_length=3)
    assert max(before.overlap) < 0.3 and min(after.overlap) > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches_what_the_taps_say(kind: str) -> None:
    """The target distribution is that of the document, and only taps tell which: deaf to them it guesses an average."""
    rng = np.random.default_rng(0)
    head_VD = make_head()
    states = rng.standard_normal((8, head_VD.shape[1]), np.float32) * 4
    documents = [
        Document(
            token_ids=document.token_ids,
            num_prompt_tokens=2,
            taps=np.broadcast_to(states[i], document.taps.shape),
            last=np.broadcast_to(states[i], document.last.shape),
        )
        for i, document in enumerate(make_documents([(2, 30)] * 8))
    ]
    schedule = Schedule(num_steps=40, tokens_per_step=256, draft_length=3, warmup_steps=2, autocast=False)
    trainer = DrafterTrainer(make_drafter(kind), head_VD, schedule)
    before = evaluate(trainer.drafter, documents, head_VD, draft_length=3)
    for _ in range(40):
        trainer.submit(documents)
        trainer.run(lambda: False)
    after = evaluate(trainer.drafter, documents, head_VD, draft_length=3)
    assert max(before.overlap) < 0.3 and min(after.overlap) > 0.9


def test_expected_verifications_equals_a_replay_with_dice() -> None:
    """The accepted length that training reports is what an engine is chosen by."""
    rng = np.random.default_rng(0)
    accept_AJ = rng.uniform(0.3, 1.0, (12, 3)).astype(np.float32)
    count, repeats = 0, 20_000
    for _ in range(repeats):
        anchor = 0
        while anchor < len(accept_AJ):
            count += 1
            accepted = 0
            while accepted < 3 and rng.random() < accept_AJ[anchor, accepted]:
                accepted += 1
            anchor += accepted + 1
    assert expected_verifications(accept_AJ) == pytest.approx(count / repeats, rel=0.01)


def test_a_perfect_drafter_needs_one_verification_for_each_draft_and_its_bonus() -> None:
    assert expected_verifications(np.ones((12, 3), np.float32)) == pytest.approx(3.0)
    assert expected_verifications(np.zeros((12, 3), np.float32)) == pytest.approx(12.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_where_the_policys_head_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that stays on the CPU ends `draft train` on a GPU at its first pass. The meta device stands for the
    GPU: a tensor there cannot be mixed with one of the CPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # the meta device has none
    head_VD = make_head().to("meta")
    drafter = new_drafter(
        kind,
        policy_config(),
        taps=TAPS,
        policy_path=Path("policy"),
        embedding_VD=head_VD,
        head_VD=head_VD,
        tap_scale_K=(1.0, 2.0, 3.0),
        seed=0,
    )
    assert {weight.device.type for weight in drafter.parameters()} == {"meta"}
    trainer = DrafterTrainer(drafter, head_VD, SCHEDULE)
    pack = make_pack(make_documents(LENGTHS), trainer._head_VD.device)
    guess(drafter, pack, trainer._head_VD, 4, overlap_share=0.5).loss.backward()
    assert {weight.grad.device.type for weight in drafter.parameters() if weight.grad is not None} == {"meta"}
