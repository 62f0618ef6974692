"""A policy of random weights, small enough that an engine starts on it in seconds, and an untrained drafter for it; a
policy with MTP heads."""

import json
import os
import time
from pathlib import Path

END_TOKEN = 1
VOCABULARY = 96


def make_policy(path: Path, *, hidden_size: int = 64, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Write a random Qwen3 checkpoint in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,  # uneven enough that a wrong temperature shows in the log-probabilities
        eos_token_id=END_TOKEN,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = END_TOKEN
    model.save_pretrained(path)
    return path


def make_mtp_policy(path: Path, *, step: int, noise: float = 0.0) -> Path:
    """Write a policy with MTP heads, which transformers reads as Qwen2 and vLLM as MiMo.

    Its embedding is random and its layers add nothing. After token i it likes i + `step` best. Without `noise` in
    what they see the heads say the same, as long as they have its embedding and output head."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(step)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=END_TOKEN,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    model.lm_head.weight.data = 0.3 * model.model.embed_tokens.weight.data.roll(step, 0)
    model.save_pretrained(path)
    heads = dict(model.model.layers[0].state_dict())
    heads |= {f"{name}_layernorm.weight": torch.ones(64) for name in ("token", "hidden", "final")}
    # Reads the policy's hidden state and the embedding of the token that follows.
    heads["input_proj.weight"] = torch.eye(64, 128).roll(64, 1) + noise * torch.randn(64, 128)
    weights = dict(model.state_dict()) | {f"model.mtp_layers.0.{name}": weight for name, weight in heads.items()}
    save_file({name: weight.clone() for name, weight in weights.items()}, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    written |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(written))
    return path


def aged(path: Path, ago_s: float) -> Path:
    """Let the files of a checkpoint have been written so long ago."""
    when_s = time.time() - ago_s
    for file in path.iterdir():
        os.utime(file, (when_s, when_s))
    return path


def save_tokenizer(path: Path) -> Path:
    """Write a tokenizer of one token a character beside the policy in `path`."""
    import string

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys(string.ascii_lowercase + string.digits + " ()+-=#\n")
    vocabulary = {token: i for i, token in enumerate(("<unk>", "<end>", *characters))}
    assert len(vocabulary) <= VOCABULARY and vocabulary["<end>"] == END_TOKEN
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(path)
    return path


def make_drafter(policy_path: Path, out: Path) -> Path:
    """Write an untrained EAGLE-3 drafter, whose embedding and output head are still the policy's."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from paceline.drafters.checkpoint import save
    from paceline.drafters.kinds import default_taps, new_drafter

    config = AutoConfig.from_pretrained(policy_path)
    embedding_VD = load_file(policy_path / "model.safetensors")["model.embed_tokens.weight"]
    drafter = new_drafter(
        "eagle3",
        config,
        taps=default_taps(config.num_hidden_layers),
        policy_path=policy_path,
        embedding_VD=embedding_VD,
        head_VD=embedding_VD,
        tap_scale_K=(1.0, 1.0, 1.0),
        seed=0,
        draft_length=3,
    )
    save(drafter, out)
    return out
