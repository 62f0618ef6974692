"""Checks of what the config names: the policy, its tokenizer and prompts, and drafters on disk."""

from __future__ import annotations

from paceline.doctor.check import CheckOutcome, check, failed, passed, skipped
from paceline.doctor.subject import Setup
from paceline.drafters.provenance import EVALUATION_FILE, read_evaluation
from paceline.files import verify_checksums
from paceline.rollout.arguments import end_tokens
from paceline.sessions.train import check_costs, check_groups, check_lengths, with_drafter

_PART = "config, policy and drafters"


@check(
    _PART,
    advice="set policy.model to a Hugging Face checkpoint directory with safetensors, or copy a damaged one again",
    otherwise="there is no policy",
)
def policy(setup: Setup) -> CheckOutcome:
    """The policy's checkpoint is there and undamaged."""
    has_checksums = verify_checksums(setup.model_path)
    says = f"{setup.config.policy.model}: {setup.num_parameters / 1e6:,.1f} M parameters, {len(setup.tensors)} tensors"
    return passed(f"{says}, {'checksums verified' if has_checksums else 'no SHA256SUMS to verify'}")


@check(_PART, needs=(policy,), advice="take tokenizer.json and generation_config.json from the policy's own repository")
def tokenizer(setup: Setup) -> CheckOutcome:
    """The tokenizer reads back what it wrote, and the policy can end a response."""
    ids = setup.prompts[0].token_ids.tolist()
    # Special tokens aside: a tokenizer that begins every text with one would add it again.
    text = setup.tokenizer.decode(ids, skip_special_tokens=True)
    again = setup.tokenizer.encode(text)
    ends = end_tokens(setup.model_path)
    if setup.tokenizer.decode(again, skip_special_tokens=True) != text:
        return failed(f"{len(ids)} tokens of a prompt mean another text when they are decoded and encoded again")
    if not ends:
        return failed("no eos_token_id in generation_config.json or config.json: every response would be cut by length")
    return passed(f"{len(ids)} tokens of a prompt there and back, end tokens {ends}")


@check(
    _PART,
    needs=(policy,),
    advice="correct [data] or [rollout] (group_size, max_tokens, engine.max_model_len) as the message says",
    otherwise="there are no prompts",
)
def prompts(setup: Setup) -> CheckOutcome:
    """Prompts and reward load, and responses have room in the context."""
    check_groups(setup.config)
    check_lengths(setup.config, setup.task)
    longest = max(len(prompt.token_ids) for prompt in setup.prompts)
    return passed(f"{setup.config.data.kind} data, prompts of up to {longest} tokens")


@check(_PART, needs=(policy,), advice="name another drafter or cost file, or none: `paceline bench costs` measures one")
def speculation(setup: Setup) -> CheckOutcome:
    """The drafter and the cost file that the config names belong to its policy and machine."""
    if setup.config.speculation is None:
        return skipped("the config does not speculate")
    check_costs(with_drafter(setup.config, setup.context), setup.model_path)
    selector = setup.config.speculation.selector
    return passed(f"{setup.config.speculation.drafter.kind}, draft length by {selector.kind}")


@check(_PART, needs=(policy,), advice="take the drafter that belongs to this policy, or make one: paceline draft train")
def drafter_eagle3(setup: Setup) -> CheckOutcome:
    """The EAGLE-3 drafter is undamaged and fits the policy."""
    return _drafter(setup, "eagle3")


@check(_PART, needs=(policy,), advice="take the drafter that belongs to this policy, or make one: paceline draft train")
def drafter_dflash(setup: Setup) -> CheckOutcome:
    """The DFlash drafter is undamaged and fits the policy."""
    return _drafter(setup, "dflash")


def _drafter(setup: Setup, kind: str) -> CheckOutcome:
    path = setup.drafter(kind)
    if path is None:
        return skipped(f"no {kind} drafter was named, and none comes with this policy")
    if not (path / EVALUATION_FILE).is_file():
        return passed("fits; without evaluation.json nobody knows what it should reach")
    accepted = read_evaluation(path).accepted_length
    return passed(f"fits; by its evaluation {accepted[-1]:.2f} tokens a verification at draft length {len(accepted)}")


CHECKS = (policy, prompts, tokenizer, speculation, drafter_eagle3, drafter_dflash)
