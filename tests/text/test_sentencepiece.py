"""SentencePiece models cut text into SentencePiece's own ids, whatever the text; damaged files are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jserve.errors import CheckpointError, UnsupportedModel
from jserve.text.from_gguf import tokenizer_from_gguf
from jserve.text.sentencepiece import SPACE, Piece, PieceKind, SentencePieceModel, build_backend
from jserve.text.sentencepiece_file import parse_sentencepiece
from jserve.text.sentencepiece_model_pb2 import SentencePieceModelFile
from jserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "oracle" / "data"
EXPECTED = json.loads((DATA / "spm_ids.json").read_text(encoding="utf-8"))
STYLES = [name for name in EXPECTED if name != "made_with"]


def model_bytes(style):
    return (DATA / f"spm_{style}.model").read_bytes()


def parse(style, prefix="every_part"):
    return parse_sentencepiece(model_bytes(style), prefix=prefix)


def tokenizer(style, prefix="every_part"):
    return Tokenizer(build_backend(parse(style, prefix).model), eos_ids=(), bos_id=None, add_bos=False)


def differing(made, rows):
    """Texts whose ids are not those expected, with both."""
    ids = [(row["text"], made.encode(row["text"], add_special=False), row["ids"]) for row in rows]
    return [row for row in ids if row[1] != row[2]]


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_sentencepiece_s(style):
    assert differing(tokenizer(style), EXPECTED[style]["sentencepiece"]) == []


@pytest.mark.parametrize("style", STYLES)
def test_ids_around_special_tokens_are_transformers(style):
    assert differing(tokenizer(style), EXPECTED[style]["transformers"]) == []


def test_a_space_in_front_of_the_first_part_alone():
    assert differing(tokenizer("llama", "first_part"), EXPECTED["llama"]["transformers_first"]) == []
    assert EXPECTED["llama"]["transformers_first"] != EXPECTED["llama"]["transformers"]


@pytest.mark.parametrize("style", ["llama", "gemma", "unigram_bytes"])
def test_text_comes_back(style):
    made = tokenizer(style)
    for row in EXPECTED[style]["sentencepiece"]:
        ids = made.encode(row["text"], add_special=False)
        assert made.decode(ids) == row["text"].replace(SPACE, " ")
        assert made.decode(ids) == made.backend.decode(ids)


def test_ids_named_by_the_file():
    file = parse("gemma")
    assert (file.bos_id, file.eos_id, file.model.unk_id, file.model.prefix) == (2, 1, 3, "none")
    file = parse("llama")
    assert (file.bos_id, file.eos_id, file.model.unk_id, file.model.prefix) == (1, 2, 0, "every_part")


def gguf_fields(style, **changes):
    """What a converter writes for a model: user-defined runs of spaces are written as spaces."""
    model = parse(style).model
    texts = [
        piece.text.replace(SPACE, " ") if piece.kind is PieceKind.USER_DEFINED else piece.text for piece in model.pieces
    ]
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [int(piece.kind) for piece in model.pieces],
        "tokenizer.ggml.bos_token_id": parse(style).bos_id,
        "tokenizer.ggml.eos_token_id": parse(style).eos_id,
        "tokenizer.ggml.unknown_token_id": model.unk_id,
        "tokenizer.ggml.add_space_prefix": model.prefix != "none",
    }
    changed = fields | changes
    return {name: value for name, value in changed.items() if value is not None}


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_gguf_gives_the_ids_of_the_model_it_was_made_from(style):
    made = tokenizer_from_gguf(gguf_fields(style))
    # User-defined pieces are added tokens there: marks that the text writes out itself are no spaces.
    rows = [row for row in EXPECTED[style]["sentencepiece"] if SPACE * 2 not in row["text"]]
    assert differing(made, [*rows, *EXPECTED[style]["transformers"]]) == []
    assert (made.bos_id, made.eos_ids, made.add_bos) == (parse(style).bos_id, (parse(style).eos_id,), True)


def test_gguf_flags():
    plain = tokenizer_from_gguf(gguf_fields("llama", **{"tokenizer.ggml.add_space_prefix": False}))
    spaced = tokenizer_from_gguf(gguf_fields("llama", **{"tokenizer.ggml.add_space_prefix": None}))
    assert plain.encode(" the", add_special=False) == spaced.encode("the", add_special=False)
    assert plain.decode(plain.encode(" the", add_special=False)) == " the"
    assert spaced.decode(spaced.encode(" the", add_special=False)) == " the"
    without = tokenizer_from_gguf(gguf_fields("llama", **{"tokenizer.ggml.add_bos_token": False}))
    assert (without.encode("", add_special=True), spaced.encode("", add_special=True)) == ([], [1])
    ends = tokenizer_from_gguf(
        gguf_fields("llama", **{"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 2})
    )
    assert ends.eos_ids == (2, 4)


def test_gguf_phi3_markers_swallow_the_whitespace_behind_them():
    phi = tokenizer_from_gguf(gguf_fields("llama", **{"general.architecture": "phi3"}))
    llama = tokenizer_from_gguf(gguf_fields("llama"))
    turn = llama.encode("<|turn|>the", add_special=False)
    assert phi.encode("<|turn|>\n the", add_special=False) == turn != llama.encode("<|turn|>\n the", add_special=False)
    assert phi.encode("<s>\nthe", add_special=False) == llama.encode("<s>\nthe", add_special=False)


def test_a_longer_run_of_user_defined_symbols_wins():
    made = tokenizer_from_gguf(gguf_fields("gemma"))
    pieces = parse("gemma").model.pieces
    ids = made.encode("a" + " " * 7 + "\n\n\nb", add_special=False)
    assert [pieces[i].text for i in ids] == ["a", SPACE * 7, "\n\n\n", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.scores": None}, "scores is missing; it must be a list of float"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores has 1 entries for 480 tokens"),
        ({"tokenizer.ggml.token_type": [9] * 480}, r"token_type\[0\] is 9; types go from 1 to 6"),
        ({"tokenizer.ggml.token_type": [6] + [1] * 479}, "the 256 bytes are no pieces"),
        ({"tokenizer.ggml.unknown_token_id": 480}, "unknown_token_id is 480; ids go from 0 to 479"),
    ],
)
def test_gguf_tables_that_contradict_each_other(changes, words):
    fields = gguf_fields("llama", **changes)
    if changes.get("tokenizer.ggml.token_type", [0])[0] == 6:
        fields["tokenizer.ggml.tokens"] = [t.replace("<0x", "<0y") for t in fields["tokenizer.ggml.tokens"]]
    with pytest.raises(CheckpointError, match=words):
        tokenizer_from_gguf(fields)


def changed(style, change):
    file = SentencePieceModelFile.FromString(model_bytes(style))
    change(file)
    return file.SerializeToString()


def set_type(file):
    file.pieces[7].type = 77


def set_suffix(file):
    file.trainer_spec.treat_whitespace_as_suffix = True


def set_model(file):
    file.trainer_spec.model_type = 4


def set_unmarked(file):
    file.normalizer_spec.escape_whitespaces = False


def set_table(file):
    file.normalizer_spec.precompiled_charsmap = b"\xff\xff\xff\xffno"


def set_twice(file):
    file.pieces[300].piece = file.pieces[301].piece
    file.pieces[302].piece = ""
    file.pieces[10].piece = "gone"


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", CheckpointError, "no pieces"),
        (b"not a model at all", CheckpointError, "not a SentencePiece model"),
        (model_bytes("llama")[:-900], CheckpointError, "not a SentencePiece model"),
        (changed("llama", set_type), CheckpointError, "piece 7 of the SentencePiece model is of unknown type 77"),
        (
            changed("llama", set_twice),
            CheckpointError,
            "pieces 300 and 301 are both .*; piece 302 is empty; .* 1 of the 256 bytes are no pieces: <0x05>",
        ),
        (changed("llama", set_table), CheckpointError, "table of replacements is damaged"),
        (changed("llama", set_suffix), UnsupportedModel, "spaces behind words"),
        (changed("llama", set_unmarked), UnsupportedModel, "leaves spaces unmarked"),
        (changed("llama", set_model), UnsupportedModel, r"of type 4; read are 1 \(unigram\), 2 \(BPE\)"),
    ],
)
def test_damaged_files(data, error, words):
    with pytest.raises(error, match=words) as raised:
        build_backend(parse_sentencepiece(data, prefix="every_part").model)
    assert raised.type is error


def test_every_problem_of_a_vocabulary_is_named():
    pieces = [Piece(text="a", score=0.0, kind=PieceKind.NORMAL), Piece(text="a", score=0.0, kind=PieceKind.NORMAL)]
    model = SentencePieceModel(kind="bpe", pieces=pieces, unk_id=5, byte_fallback=True)
    with pytest.raises(CheckpointError, match=r"0 and 1 are both 'a'; the unknown piece is 5.*; text may become bytes"):
        build_backend(model)
    with pytest.raises(CheckpointError, match="neither a piece for the unknown"):
        build_backend(replace(model, pieces=pieces[:1], unk_id=None, byte_fallback=False))
    unused = [*pieces[:1], Piece(text="b", score=0.0, kind=PieceKind.UNUSED)]
    with pytest.raises(UnsupportedModel, match="unused pieces"):
        build_backend(replace(model, kind="unigram", pieces=unused, unk_id=0, byte_fallback=False))


def test_control_pieces_are_never_made_by_merges():
    """ "<", "s>" and "<s>" are all pieces, and the text of a control piece is not one unless it is found as such."""
    texts = ["<unk>", "<s>", "<", "s", ">", "s>"]
    kinds = [PieceKind.UNKNOWN, PieceKind.CONTROL] + [PieceKind.NORMAL] * 4
    pieces = [Piece(text=text, score=0.0, kind=kind) for text, kind in zip(texts, kinds, strict=True)]
    backend = build_backend(SentencePieceModel(kind="bpe", pieces=pieces, unk_id=0, byte_fallback=False, prefix="none"))
    assert [token.id for token in backend.model.tokenize("<s>")] == [2, 5]
