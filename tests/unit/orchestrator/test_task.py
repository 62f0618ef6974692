"""A user's own task: what a wrong file or function says, and that held-out rows stay held out."""

import datetime
import json
from itertools import islice
from typing import cast

import pytest

from letters import Letters
from paceline.config import Config, HubData, JsonlData
from paceline.orchestrator.task import load_task
from paceline.sessions.workloads import make_task
from paceline.types import Tokenizer
from scripts.rebuild_arena.tokenizer import make_tokenizer


def write_task(tmp_path, reward: str, rows: list[dict]) -> JsonlData:
    (tmp_path / "reward.py").write_text(reward)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlData(path=tmp_path / "rows.jsonl", reward=f"{tmp_path}/reward.py:reward")


CHAT = {"role": "user", "content": "hi"}
ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


def test_held_out_rows_are_never_trained_on_and_epochs_differ_in_order(tmp_path):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", ROWS)
    task = load_task(data, Letters(), seed=0, num_heldout=3)
    assert [prompt.text for prompt in task.heldout] == ["p7", "p8", "p9"]
    first, second = ([prompt.text for prompt in islice(task.prompts, 7)] for _ in range(2))
    assert sorted(first) == sorted(second) == [f"p{i}" for i in range(7)]
    assert first != second


def test_missing_prompt_field_names_the_fields_that_are_there(tmp_path):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", [{"question": "q"}] * 5)
    with pytest.raises(ValueError, match=r"no prompt under 'prompt'; it has \['question'\]"):
        load_task(data, Letters(), seed=0, num_heldout=1)


def test_messages_go_through_the_chat_template_and_special_tokens_are_not_added_twice(tmp_path):
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    rows = [{"prompt": "trained on"}, {"prompt": chat}, {"prompt": "1+1"}]
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", rows)
    tokenizer = Letters(begin="^")
    from_chat, from_text = load_task(data, tokenizer, seed=0, num_heldout=2).heldout
    assert from_chat.text == "^<system>add<user>1+1<assistant>"
    assert tokenizer.decode(from_chat.token_ids.tolist()) == "^<system>add<user>1+1<assistant>"
    assert tokenizer.decode(from_text.token_ids.tolist()) == "^1+1", "a text is encoded as the tokenizer does by itself"


def test_tokenizer_without_a_chat_template_says_where_it_goes(tmp_path):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", [{"prompt": [CHAT]}] * 2)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^data.prompt_key: .*line 1: .*chat_template.jinja in the directory"):
        load_task(data, cast("Tokenizer", tokenizer), seed=0, num_heldout=1)


@pytest.mark.parametrize("content", [None, 7, [], {"role": "user", "content": "hi"}])
def test_prompt_that_is_neither_text_nor_messages_is_refused(tmp_path, content):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", [{"prompt": content}] * 2)
    with pytest.raises(ValueError, match=r"^data.prompt_key: .*line 1: got .*must be a text or a list of messages"):
        load_task(data, Letters(), seed=0, num_heldout=1)


def test_line_that_is_not_json_is_named(tmp_path):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", ROWS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p0"}\nnot json\n{"prompt": "p1"}\n')
    with pytest.raises(ValueError, match=r"^data.path: .*line 2.*not JSON"):
        load_task(data, Letters(), seed=0, num_heldout=1)


@pytest.mark.parametrize("row", ["[1]", "3", "null", '"text"'])
def test_row_that_is_no_object_is_named(tmp_path, row):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", ROWS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p0"}\n\n' + row + "\n")
    with pytest.raises(ValueError, match=r"^data\.path: .*rows\.jsonl, line 3: got .*; must be a JSON object"):
        load_task(data, Letters(), seed=0, num_heldout=1)


@pytest.mark.parametrize(("train", "heldout", "key"), [([], ROWS, "path"), (ROWS, [], "eval_path")])
def test_file_without_rows_is_refused_instead_of_drawn_from_for_ever(tmp_path, train, heldout, key):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", train)
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heldout))
    data = data.model_copy(update={"eval_path": tmp_path / "eval.jsonl"})
    with pytest.raises(ValueError, match=rf"^data\.{key}: .* has no rows"):
        load_task(data, Letters(), seed=0, num_heldout=1)


@pytest.mark.parametrize("prompt", ["", "\ud800", None])
def test_prompt_that_cannot_be_sampled_from_is_named_by_its_line(tmp_path, prompt):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", [*ROWS[:3], {"prompt": prompt}, *ROWS])
    with pytest.raises(ValueError, match=r"^data\.prompt_key: .*rows\.jsonl, line 4: "):
        load_task(data, Letters(), seed=0, num_heldout=1)


def test_training_prompt_without_room_for_its_response_is_named_by_its_line(tmp_path):
    rows = [{"prompt": "x" * length} for length in (3, 10, 11, 20, 2, 2)]
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", rows)
    with pytest.raises(
        ValueError, match=r"^data\.path: .*rows\.jsonl, line 3: .* 11 tokens.*at most 10 .*longest has 20"
    ):
        load_task(data, Letters(), seed=0, num_heldout=1, max_prompt_tokens=10)
    load_task(data, Letters(), seed=0, num_heldout=1, max_prompt_tokens=20)


def test_room_for_prompts_is_what_responses_leave(tmp_path):
    data = write_task(tmp_path, "def reward(prompt, completion): return 1.0", [{"prompt": "x" * 11}] * 5)
    sizes = {"max_tokens": 20, "engine": {"max_model_len": 30}}
    config = Config.model_validate(
        {"policy": {"model": "arena:small"}, "data": data.model_dump(), "rollout": sizes, "eval": {"num_prompts": 1}}
    )
    with pytest.raises(ValueError, match=r"at most 10 .*max_model_len"):
        make_task(config, Letters())


@pytest.mark.parametrize(("offline", "says"), [(True, "HF_HUB_OFFLINE is set"), (False, "Check the name, the split")])
def test_dataset_that_cannot_be_loaded_says_what_to_do(monkeypatch, offline, says):
    datasets = pytest.importorskip("datasets")

    def fail(*args, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    data = HubData(path="nobody/nothing", reward="json:loads")
    with pytest.raises(ValueError, match=f"data.path: 'nobody/nothing'.*no route to the hub.*{says}"):
        load_task(data, Letters(), seed=0, num_heldout=1)


@pytest.mark.parametrize(("parameters", "taken"), [("prompt, completion, row", True), ("prompt, completion", False)])
def test_row_that_is_no_json_is_refused_when_the_reward_takes_it(tmp_path, parameters, taken):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "reward.py").write_text(f"def reward({parameters}): return 1.0")
    rows = [{"prompt": "p", "day": datetime.date(2026, 1, 1)}] * 3
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    data = HubData(path=str(tmp_path / "data"), reward=f"{tmp_path}/reward.py:reward")
    if not taken:
        load_task(data, Letters(), seed=0, num_heldout=1)
        return
    with pytest.raises(ValueError, match=r"^data\.path: .*row 0: .*date.*not JSON serializable; .*remove_columns"):
        load_task(data, Letters(), seed=0, num_heldout=1)
