"""Tokenizers of Hugging Face style folders: every kind of file, what settings say, and what contradicts itself."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.serving.embed_texts import TextPreparer
from jserve.testing.tokenizer import BOS_ID, EOS_ID, ByteTokenizer
from jserve.text.from_hf import has_tokenizer, read_hf_tokenizer

DATA = Path(__file__).parent.parent / "oracle" / "data"
ORACLE = json.loads((DATA / "hf_tokenizers.json").read_text(encoding="utf-8"))
COUNT = len(ORACLE["vocab"])
PIECES = (DATA / "spm_llama.model").read_bytes()


def write(folder, **files):
    """Files by name, "__" for the dot; what is no text or bytes is written as JSON."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def byte_json(*, prefix=(), suffix=(), **changes):
    """The byte tokenizer's tokenizer.json, with tokens around every text."""
    made = json.loads(ByteTokenizer().to_json())
    if prefix or suffix:
        names = {BOS_ID: "<bos>", EOS_ID: "<eos>"}
        single = [
            *({"SpecialToken": {"id": names[i], "type_id": 0}} for i in prefix),
            {"Sequence": {"id": "A", "type_id": 0}},
            *({"SpecialToken": {"id": names[i], "type_id": 0}} for i in suffix),
        ]
        special = {names[i]: {"id": names[i], "ids": [i], "tokens": [names[i]]} for i in (*prefix, *suffix)}
        made["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        }
    return made | changes


def differing(tokenizer, rows):
    ids = [(row["text"], tokenizer.encode(row["text"], add_special=False), row["ids"]) for row in rows]
    return [row for row in ids if row[1] != row[2]]


def vocabulary(folder, **settings):
    added = {str(COUNT + i): token for i, token in enumerate(ORACLE["added"].values())}
    config = {"added_tokens_decoder": added, **settings}
    merges = "\n".join(["#version: 0.2", *ORACLE["merges"], ""])
    return write(folder, vocab__json=ORACLE["vocab"], merges__txt=merges, tokenizer_config__json=config)


@pytest.mark.parametrize(
    ("expected", "settings"),
    [
        ("gpt2", {"tokenizer_class": "GPT2TokenizerFast"}),
        ("gpt2", {}),
        ("gpt2_space", {"add_prefix_space": True}),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
    ],
)
def test_vocabulary_and_merges_give_transformers_ids(tmp_path, expected, settings):
    text = read_hf_tokenizer(vocabulary(tmp_path, **settings))
    assert differing(text.tokenizer, ORACLE[expected]) == []
    assert (text.tokenizer.vocab_size, text.tokenizer.add_bos) == (COUNT + 2, False)
    assert text.tokenizer.decode([COUNT, COUNT + 1, ORACLE["vocab"]["<|endoftext|>"]]) == "<think>"


def test_encoders_run_the_whole_tokenizer_and_truncate(tmp_path):
    folder = write(tmp_path, tokenizer__json=ORACLE["bert"])
    text = read_hf_tokenizer(folder, of_encoder=True)
    for row in ORACLE["bert_ids"]:
        found, whole = (
            TextPreparer(text.tokenizer, max_tokens=limit, lowercase=False).prepare([row["text"]])[0]
            for limit in (row["max_length"], 10_000)
        )
        assert list(found.ids) == row["ids"], row
        assert found.truncated is (len(whole.ids) > row["max_length"])
    with pytest.raises(UnsupportedModel, match=r"puts \[SEP\] behind every text; prompts that end so are not built"):
        read_hf_tokenizer(folder)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    tokenizer = read_hf_tokenizer(write(tmp_path, tokenizer__json=ORACLE["bert"]), of_encoder=True).tokenizer
    assert len(tokenizer.encode("day " * 50, add_special=False)) == 50
    assert len(tokenizer.encode("day", add_special=False)) == 1


@pytest.mark.parametrize(
    ("made", "config", "bos", "added"),
    [
        (byte_json(prefix=[BOS_ID]), {"bos_token": "<bos>"}, BOS_ID, True),
        (byte_json(prefix=[BOS_ID]), {}, BOS_ID, True),
        # What the tokenizer does itself counts, as in transformers.
        (byte_json(prefix=[BOS_ID]), {"bos_token": "<bos>", "add_bos_token": False}, BOS_ID, True),
        (byte_json(), {"bos_token": "<bos>", "add_bos_token": True}, BOS_ID, False),
        (byte_json(), {"bos_token": {"content": "<bos>", "lstrip": False}}, BOS_ID, False),
        (byte_json(), {"bos_token": None}, None, False),
    ],
)
def test_bos_of_a_tokenizer_json(tmp_path, made, config, bos, added):
    tokenizer = read_hf_tokenizer(write(tmp_path, tokenizer__json=made, tokenizer_config__json=config)).tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos) == (bos, added)
    assert tokenizer.encode("hi", add_special=True) == [BOS_ID] * added + [104, 105]
    assert tokenizer.encode("<bos>hi", add_special=True) == [BOS_ID, 104, 105]


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"bos_token": "<s>"}, True),
        ({"bos_token": "<s>", "add_bos_token": True}, True),
        ({"bos_token": "<s>", "add_bos_token": False}, False),
    ],
)
def test_bos_of_a_sentencepiece_model(tmp_path, config, added):
    tokenizer = read_hf_tokenizer(write(tmp_path, tokenizer__model=PIECES, tokenizer_config__json=config)).tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, added)


def test_a_sentencepiece_model_alone_names_its_own_bos_and_eos(tmp_path):
    tokenizer = read_hf_tokenizer(write(tmp_path, tokenizer__model=PIECES)).tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, (2,))


def test_sentencepiece_gives_the_ids_of_sentencepiece(tmp_path):
    rows = json.loads((DATA / "spm_ids.json").read_text(encoding="utf-8"))["llama"]
    tokenizer = read_hf_tokenizer(write(tmp_path, tokenizer__model=PIECES)).tokenizer
    assert differing(tokenizer, [*rows["sentencepiece"], *rows["transformers"]]) == []
    write(tmp_path, tokenizer_config__json={"legacy": False})
    assert differing(read_hf_tokenizer(tmp_path).tokenizer, rows["transformers_first"]) == []


def test_tokens_added_to_a_sentencepiece_model(tmp_path):
    folder = write(
        tmp_path,
        tokenizer__model=PIECES,
        added_tokens__json={"<|user|>": 481, "<pad>": 480},
        special_tokens_map__json={"pad_token": "<pad>", "bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        tokenizer_config__json={"additional_special_tokens": ["<|user|>"]},
    )
    tokenizer = read_hf_tokenizer(folder).tokenizer
    ids = tokenizer.encode("the<pad><|user|>the", add_special=True)
    the = tokenizer.encode("the", add_special=False)
    assert ids == [1, *the, 480, 481, *the]
    assert tokenizer.decode([480, 481]) == ""
    # Looked for in normalized text it would be hidden behind the space in front.
    decoder = {"480": {"content": "<pad>", "special": True, "normalized": True, "rstrip": True}}
    write(tmp_path, added_tokens__json={}, tokenizer_config__json={"added_tokens_decoder": decoder})
    tokenizer = read_hf_tokenizer(folder).tokenizer
    assert tokenizer.encode("the<pad> \nthe", add_special=True) == [1, *the, 480, *the]


def test_every_end_once_the_tokenizer_s_own_first(tmp_path):
    folder = write(
        tmp_path,
        tokenizer__json=byte_json(),
        tokenizer_config__json={"eos_token": "<eos>"},
        generation_config__json={"eos_token_id": [10, EOS_ID, 33]},
        config__json={"eos_token_id": 65, "text_config": {"eos_token_id": [33, 66]}},
    )
    assert read_hf_tokenizer(folder).tokenizer.eos_ids == (EOS_ID, 10, 33, 65, 66)
    write(tmp_path, tokenizer_config__json={})
    assert read_hf_tokenizer(folder).tokenizer.eos_ids == (10, EOS_ID, 33, 65, 66)
    write(tmp_path, special_tokens_map__json={"eos_token": {"content": "<eos>"}}, generation_config__json={})
    assert read_hf_tokenizer(folder).tokenizer.eos_ids == (EOS_ID, 65, 33, 66)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config__json": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config__json": {"chat_template": "one"}, "chat_template__jinja": "two"}, "two"),
        ({"chat_template__json": {"chat_template": "three"}}, "three"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
        ({"tokenizer_config__json": {"chat_template": {"rag": "only"}}}, "only"),
    ],
)
def test_chat_templates(tmp_path, files, template):
    write(tmp_path, tokenizer__json=byte_json(), **files)
    assert read_hf_tokenizer(tmp_path).chat_template == template


def test_tokens_named_for_a_role_become_special(tmp_path):
    made = byte_json()
    for token in made["added_tokens"]:
        token["special"] = False
    folder = write(tmp_path, tokenizer__json=made, tokenizer_config__json={"eos_token": "<eos>"})
    tokenizer = read_hf_tokenizer(folder).tokenizer
    assert tokenizer.decode([BOS_ID, EOS_ID]) == "<bos>"


def test_what_is_found(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tokenizer: none of tokenizer\.json, tokenizer\.model"):
        read_hf_tokenizer(tmp_path)
    write(tmp_path, vocab__json=ORACLE["vocab"])
    assert not has_tokenizer(tmp_path)
    write(tmp_path, merges__txt="\n".join(ORACLE["merges"]))
    assert has_tokenizer(tmp_path)
    # A tokenizer.json comes first.
    write(tmp_path, tokenizer__json=byte_json())
    assert read_hf_tokenizer(tmp_path).tokenizer.vocab_size == 258


def gap():
    made = byte_json()
    made["added_tokens"][1]["id"] = 300
    return made


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer__json": "{}"}, r"tokenizer\.json: not a tokenizer"),
        ({"tokenizer__json": b"\xff{}"}, r"tokenizer\.json: it is not UTF-8 at byte 0"),
        ({"tokenizer__json": gap()}, r"tokenizer\.json: added token '<eos>' has the id 300, and 257 in the vocabulary"),
        ({"tokenizer__model": b"no model"}, r"tokenizer\.model: not a SentencePiece model"),
        ({"tokenizer__model": PIECES[:3000]}, r"tokenizer\.model: not a SentencePiece model"),
        ({"vocab__json": {"a": "b"}, "merges__txt": ""}, r"vocab\.json: 'a' is 'b'; it must be an id"),
        ({"vocab__json": {"a": 0, "b": 0}, "merges__txt": ""}, r"vocab\.json: two tokens have one id"),
        ({"vocab__json": [], "merges__txt": ""}, r"vocab\.json: it is a list; it must be an object"),
        ({"vocab__json": {"a": 0}, "merges__txt": "a b"}, r"merges\.txt: it does not fit vocab\.json"),
        ({"vocab__json": {"a": 0}, "merges__txt": "a a\na"}, r"merges\.txt: line 2 is 'a'; it must be two tokens"),
        (
            {"tokenizer__json": byte_json(), "tokenizer_config__json": "{"},
            r"tokenizer_config\.json: it is not JSON: Expecting",
        ),
        (
            {"tokenizer__json": byte_json(), "tokenizer_config__json": {"added_tokens_decoder": {"x": {}}}},
            r"added_tokens_decoder is \{'x': \{\}\}; it must be an object of tokens by their ids",
        ),
        (
            {"tokenizer__json": byte_json(), "tokenizer_config__json": {"added_tokens_decoder": {"7": {}}}},
            r"added_tokens_decoder\[7\] is \{\}; it must have a text as its content",
        ),
        (
            {"tokenizer__json": byte_json(), "added_tokens__json": {"<eos>": 3, "<x>": "y"}},
            r"added_tokens\.json: '<x>' is 'y'; it must be an id\n.*'<eos>' has the id 3 there, and 257 in the",
        ),
        (
            {"tokenizer__json": byte_json(prefix=[BOS_ID]), "tokenizer_config__json": {"bos_token": "<eos>"}},
            r"it puts token 256 in front of a text, and tokenizer_config\.json names 257 as bos_token",
        ),
        (
            {"tokenizer__json": byte_json(), "tokenizer_config__json": {"chat_template": [{"name": "rag"}]}},
            "chat_template is .*; it must be a text, or a list of named ones",
        ),
        (
            {"tokenizer__json": byte_json(), "tokenizer_config__json": {"chat_template": {"a": "x", "b": "y"}}},
            "chat_template has a, b; one must be named default",
        ),
        (
            {"tokenizer__model": PIECES, "tokenizer_config__json": {"add_bos_token": "yes", "bos_token": 3}},
            r"(?s)bos_token is 3; it must be a text.*add_bos_token is 'yes'; it must be true or false",
        ),
    ],
)
def test_damaged_and_contradictory_files(tmp_path, files, words):
    with pytest.raises(CheckpointError, match=words) as error:
        read_hf_tokenizer(write(tmp_path, **files))
    assert error.type is CheckpointError
    assert str(tmp_path) in str(error.value)


def test_all_problems_are_told_at_once(tmp_path):
    write(
        tmp_path,
        tokenizer__json=byte_json(),
        tokenizer_config__json={"eos_token": "<end>", "bos_token": "<begin>"},
        generation_config__json={"eos_token_id": [300, "x"]},
        config__json={"eos_token_id": -1},
    )
    with pytest.raises(CheckpointError) as error:
        read_hf_tokenizer(tmp_path)
    assert str(error.value).split("\n  ")[1:] == [
        "tokenizer_config.json: eos_token is '<end>', which is no token of the vocabulary",
        "generation_config.json: eos_token_id names 300, which is no token id of the vocabulary",
        "generation_config.json: eos_token_id names 'x', which is no token id of the vocabulary",
        "config.json: eos_token_id names -1, which is no token id of the vocabulary",
        "tokenizer_config.json: bos_token is '<begin>', which is no token of the vocabulary",
    ]


def test_too_large_files_are_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200_000_001)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: it has 200000001 bytes; at most 200000000 are read"):
        read_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tokenizer__json": byte_json(prefix=[BOS_ID, EOS_ID])},
            "puts 2 tokens in front of a text; at most 1 is built",
        ),
        (
            {"vocab__json": {}, "merges__txt": "", "tokenizer_config__json": {"tokenizer_class": "RobertaTokenizer"}},
            r"tokenizer_class is 'RobertaTokenizer'; classes read from vocab\.json are GPT2Tokenizer",
        ),
        (
            {"tokenizer__model": PIECES, "tokenizer_config__json": {"add_eos_token": True}},
            "add_eos_token is true; prompts that end with EOS are not built",
        ),
    ],
)
def test_what_is_not_built(tmp_path, files, words):
    with pytest.raises(UnsupportedModel, match=words):
        read_hf_tokenizer(write(tmp_path, **files))


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_space_in_front_is_what_the_settings_say(tmp_path, asked):
    """The vocabulary's file says no; transformers lets its settings win."""
    backend = ByteTokenizer().backend
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    write(tmp_path, tokenizer__json=backend.to_str(), tokenizer_config__json={"add_prefix_space": asked})
    ids = read_hf_tokenizer(tmp_path).tokenizer.encode("a", add_special=False)
    assert len(ids) == (2 if asked else 1)


def test_a_tokenizer_that_fails_on_every_text(tmp_path):
    Tokenizer(models.WordLevel({}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no text can be tokenized with it"):
        read_hf_tokenizer(tmp_path)
