"""Known families from Orbax trees: jserve's own modules, Hugging Face's names, MaxText and google-deepmind/gemma."""

import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file
from saving import save, save_standard, save_steps
from trees import (
    GEMMA3,
    GPT2,
    LLAMA,
    LLAMA3,
    QWEN3,
    deepmind_gemma,
    flax_names,
    gpt2_weights,
    hf_weights,
    maxtext,
    nested,
)

from jserve.checkpoints.arrays.key_map import plan_leaves
from jserve.checkpoints.arrays.lazy import LazyArray
from jserve.checkpoints.arrays.tree import flatten, unflatten_like
from jserve.checkpoints.convert import convert
from jserve.checkpoints.hf.families import HF_FAMILIES
from jserve.checkpoints.orbax.beside import find_description
from jserve.checkpoints.orbax.open import open_orbax
from jserve.checkpoints.written import open_written
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.registry import build_abstract, family
from jserve.testing.tokenizer import ByteTokenizer
from jserve.text.tokenizer import Tokenizer


def described(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_nearest_description_counts_whatever_it_is_called(tmp_path):
    near, far = tmp_path / "a" / "b", tmp_path / "a"
    described(near, {})
    (near / "config.json").rename(near / "jserve.json")
    described(far, LLAMA)
    assert find_description([near, far]) == near / "jserve.json"
    described(near, {"learning_rate": 0.1})
    assert find_description([near, far]) == near / "jserve.json"
    described(near, LLAMA)
    assert find_description([near, far]) == near / "config.json"
    (near / "jserve.json").unlink()
    described(near, {"learning_rate": 0.1})
    assert find_description([near, far]) == near / "config.json"
    assert find_description([far / "nowhere"]) is None


def expected(config, weights):
    """The leaves that Hugging Face's key map makes of ``weights``."""
    found = HF_FAMILIES[config["model_type"]]
    _, state = build_abstract(family(found.family), found.config(config), np.float32)
    tensors = {
        name: LazyArray(shape=value.shape, dtype=value.dtype, read_region=value.__getitem__)
        for name, value in weights.items()
    }
    wanted = {path: tuple(leaf.shape) for path, leaf in flatten(state).items()}
    leaves = plan_leaves(found.key_map, tensors, wanted, where="oracle")
    return {path: leaf.read() for path, leaf in leaves.items()}


def assert_leaves(checkpoint, wanted, *, exact=True):
    assert checkpoint.leaves.keys() == wanted.keys()
    for path, leaf in checkpoint.leaves.items():
        if exact:
            np.testing.assert_array_equal(leaf.read(), wanted[path], err_msg=".".join(path))
        else:
            np.testing.assert_allclose(leaf.read(), wanted[path], rtol=3e-7, err_msg=".".join(path))


def open_(folder):
    return open_orbax(folder, source=str(folder))


WEIGHTS = {name: hf_weights(config) for name, config in (("llama", LLAMA), ("qwen3", QWEN3), ("gemma3", GEMMA3))}


@pytest.mark.parametrize("whole", [True, False])
def test_the_state_of_jserves_own_module(tmp_path, whole):
    wanted = expected(LLAMA, WEIGHTS["llama"])
    found = HF_FAMILIES["llama"]
    graphdef, state = build_abstract(family("llama"), found.config(LLAMA), np.float32)
    params = unflatten_like(state, {path: jnp.asarray(value) for path, value in wanted.items()})
    module = nnx.merge(graphdef, params)
    described(tmp_path / "run", LLAMA)
    save_steps(tmp_path / "run" / "steps", {1: nnx.state(module) if whole else {"params": params}})
    checkpoint = open_(tmp_path / "run" / "steps")
    assert_leaves(checkpoint, wanted)
    assert checkpoint.layout == (
        "Orbax checkpoint, step 1 (1 finished, 0 unfinished), item default (OCDBT, zarr), a tree of jserve's llama, "
        "float32"
    )
    assert (checkpoint.name, checkpoint.family, checkpoint.tokenizer) == ("run", "llama", None)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"params": t}, lambda t: {"params": t, "opt_state": t}])
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_hugging_faces_flax_modules(tmp_path, tied, wrap):
    config = LLAMA | {"tie_word_embeddings": tied}
    weights = {k: v for k, v in WEIGHTS["llama"].items() if not tied or k != "lm_head.weight"}
    save_standard(described(tmp_path, config) / "ck", wrap(flax_names(weights)))
    checkpoint = open_(tmp_path / "ck")
    assert_leaves(checkpoint, expected(config, weights))
    assert checkpoint.layout.endswith("a tree of the names of Hugging Face, float32")


def test_names_of_hugging_faces_tensors(tmp_path):
    save_standard(described(tmp_path, LLAMA) / "ck", nested(WEIGHTS["llama"]))
    assert_leaves(open_(tmp_path / "ck"), expected(LLAMA, WEIGHTS["llama"]))


@pytest.mark.parametrize("prefixed", [True, False])
def test_gpt2_by_flax(tmp_path, prefixed):
    weights = gpt2_weights()
    tree = flax_names(weights)
    save_standard(described(tmp_path, GPT2) / "ck", {"params": {"transformer": tree} if prefixed else tree})
    assert_leaves(open_(tmp_path / "ck"), expected(GPT2, weights))


@pytest.mark.parametrize("scan_axis", [None, 0, 1])
@pytest.mark.parametrize("config", [LLAMA, LLAMA3, QWEN3], ids=["llama", "llama3", "qwen3"])
def test_maxtext(tmp_path, config, scan_axis):
    weights = WEIGHTS[config["model_type"]]
    tree = {"params": {"params": maxtext(config, weights, scan_axis=scan_axis)}, "step": np.int32(7), "opt_state": {}}
    describe = described(tmp_path, config)
    save_steps(describe / "checkpoints", {7: tree}, items=_items)
    checkpoint = open_(tmp_path / "checkpoints")
    assert_leaves(checkpoint, expected(config, weights), exact=config is QWEN3)
    assert "item items (OCDBT, zarr), a tree of MaxText" in checkpoint.layout


def _items(tree):
    return ocp.args.Composite(items=ocp.args.PyTreeSave(tree))


def test_maxtexts_queries_are_not_rounded_once_more(tmp_path):
    weights = {k: v.astype(jnp.bfloat16) for k, v in WEIGHTS["llama"].items()}
    tree = maxtext(LLAMA, weights, scan_axis=1)
    save_standard(described(tmp_path, LLAMA) / "ck", {"params": tree})
    leaf = open_(tmp_path / "ck").leaves["layers", "0", "q"]
    assert leaf.dtype == np.float32


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GEMMA3, "is a tree of MaxText for a gemma3_text; such trees are read for llama, mistral, qwen3"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "a rotary scaling of the kind linear"),
    ],
)
def test_of_maxtext_only_what_is_known(tmp_path, config, words):
    save_standard(described(tmp_path, config) / "ck", {"params": maxtext(LLAMA, WEIGHTS["llama"], scan_axis=1)})
    with pytest.raises(UnsupportedModel, match=words):
        open_(tmp_path / "ck")


@pytest.mark.parametrize("form", ["nested", "flat", "stacked"])
def test_deepminds_gemma(tmp_path, form):
    tree = deepmind_gemma(GEMMA3, WEIGHTS["gemma3"], form)
    save(described(tmp_path, GEMMA3) / "ck", tree, use_ocdbt=form != "nested")
    checkpoint = open_(tmp_path / "ck")
    assert_leaves(checkpoint, expected(GEMMA3, WEIGHTS["gemma3"]))
    assert checkpoint.layout.endswith("a tree of google-deepmind/gemma, float32")


def test_every_array_without_a_place_is_named(tmp_path):
    tree = maxtext(LLAMA, WEIGHTS["llama"], scan_axis=None)
    tree["decoder"]["layers_1"]["MoeBlock_0"] = {"gate": {"kernel": np.ones((8, 4), np.float32)}}
    tree["decoder"]["layers_2"]["mlp"]["wo"]["kernel"] = np.ones((3, 12, 8), np.float32)
    save_standard(described(tmp_path, LLAMA) / "ck", tree)
    with pytest.raises(CheckpointError) as error:
        open_(tmp_path / "ck")
    assert error.value.message.splitlines() == [
        f"{tmp_path}/ck has arrays that have no place in a model:",
        "  decoder.layers.1.MoeBlock_0.gate.kernel [8, 4] is not known of such trees",
        "  decoder.layers.2.mlp.wo.kernel [3, 12, 8]: wanted axes ['F', 'D']",
    ]


def test_other_sizes_than_config_json_says(tmp_path):
    save_standard(described(tmp_path, LLAMA | {"vocab_size": 20}) / "ck", flax_names(WEIGHTS["llama"]))
    with pytest.raises(
        CheckpointError, match=r"token_embedding.weight: wanted \[20, 8\] in tensor model.embed_tokens.weight, found"
    ):
        open_(tmp_path / "ck")


def test_a_tree_that_nobody_knows(tmp_path):
    save_standard(described(tmp_path, LLAMA) / "ck", {"params": {"a": {"b": np.ones(2)}, "c": np.ones(3)}})
    with pytest.raises(UnsupportedModel, match=r"is no tree that is known: jserve's own llama \(head, layers") as error:
        open_(tmp_path / "ck")
    assert error.value.fix == ("serve it with a module of your own: jserve serve package.module:Class --checkpoint DIR")


@pytest.mark.parametrize(
    "tree",
    [
        {"Dense_0": {"kernel": np.ones((4, 8))}, "Embed_0": {"embedding": np.ones((16, 8))}},
        {"Conv_0": {"kernel": np.ones((3, 3, 4, 8))}},
        {"layers": {"attn": {"kernel": np.ones((5, 8, 8))}}, "embed": {"embedding": np.ones((16, 8))}},
    ],
)
def test_kernels_alone_make_no_tree_of_hugging_face(tmp_path, tree):
    save_standard(described(tmp_path, LLAMA) / "ck", {"params": tree})
    with pytest.raises(
        UnsupportedModel, match=r"is no tree that is known: .* it has (Dense_0|Conv_0|embed)\."
    ) as error:
        open_(tmp_path / "ck")
    assert "jserve serve package.module:Class --checkpoint DIR" in error.value.fix


def test_without_a_word_on_the_model(tmp_path):
    save_standard(tmp_path / "a" / "b" / "ck", flax_names(WEIGHTS["llama"]))
    with pytest.raises(CheckpointError) as error:
        open_(tmp_path / "a" / "b" / "ck")
    assert error.value.message == (
        f"{tmp_path}/a/b/ck holds arrays and no word on the model: config.json (Hugging Face's) or jserve.json is "
        f"missing, there and in the folders {tmp_path}/a/b, {tmp_path}/a"
    )
    assert "jserve serve package.module:Class --checkpoint DIR" in error.value.fix


def test_integers_are_no_parameters(tmp_path):
    tree = flax_names(WEIGHTS["llama"])
    tree["model"]["norm"]["scale"] = np.ones(8, np.int8)
    save_standard(described(tmp_path, LLAMA) / "ck", tree)
    with pytest.raises(UnsupportedModel, match=r"stores parameters as int8 \(as in norm\)"):
        open_(tmp_path / "ck")


def test_what_stands_beside(tmp_path):
    tokenizer = ByteTokenizer()
    described(tmp_path / "run", LLAMA | {"vocab_size": tokenizer.vocab_size, "eos_token_id": 5})
    weights = hf_weights(LLAMA | {"vocab_size": tokenizer.vocab_size})
    save_steps(tmp_path / "run" / "checkpoints", {4: flax_names(weights)})
    checkpoint = open_(tmp_path / "run" / "checkpoints" / "4")
    assert checkpoint.eos_ids == (5,)
    assert checkpoint.name == "run"
    (tmp_path / "run" / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "run" / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": [5, 6]}')
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint = open_(tmp_path / "run" / "checkpoints" / "4" / "default")
    assert isinstance(checkpoint.tokenizer, Tokenizer)
    assert checkpoint.eos_ids == (5, 6)
    assert checkpoint.generation == {"temperature": 0.5, "top_k": 7}
    assert checkpoint.chat_template == "{{ messages }}"
    assert str(checkpoint.path).endswith("4/default")
    (tmp_path / "run" / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match=r"token_embedding\.weight: wanted \[16, 8\] .* found \[258, 8\]"):
        open_(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_what_trainers_saved_is_converted_in_either_form(tmp_path, to):
    """MaxText's tree, stacked and inside a train state: the tensors that it was made of come back."""
    weights = hf_weights(LLAMA)
    state = {"params": {"params": maxtext(LLAMA, weights, scan_axis=1)}, "opt_state": {"mu": np.ones(3)}, "step": 3}
    save_steps(described(tmp_path / "run", LLAMA) / "ck", {7: state})
    convert(str(tmp_path / "run" / "ck"), tmp_path / "out", to=to)
    if to == "safetensors":
        found = load_file(tmp_path / "out" / "model.safetensors")
    else:
        weights = {".".join(path): leaf for path, leaf in expected(LLAMA, weights).items()}
        found = {".".join(path): leaf.read() for path, leaf in open_written(tmp_path / "out").leaves.items()}
    assert found.keys() == weights.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-6)  # queries are divided there, and multiplied here


BERT = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}


def test_an_encoder_has_its_settings_from_beside_it(tmp_path):
    found = HF_FAMILIES["bert"]
    _, state = build_abstract(family("bert"), found.config(BERT), np.float32)
    tree = unflatten_like(state, {path: np.ones(leaf.shape, np.float32) for path, leaf in flatten(state).items()})
    save_standard(described(tmp_path, BERT) / "ck", {"params": tree})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    checkpoint = open_(tmp_path / "ck")
    assert checkpoint.encoder is not None
    assert (checkpoint.encoder.max_tokens, checkpoint.encoder.pooling.how) == (16, "mean")


def test_ends_are_named_by_the_generation_config_too(tmp_path):
    save_standard(described(tmp_path, LLAMA | {"eos_token_id": 5}) / "ck", nested(WEIGHTS["llama"]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 5]}')
    assert open_(tmp_path / "ck").eos_ids == (6, 5)


def test_quantized_weights_are_refused_by_name(tmp_path):
    config = LLAMA | {"quantization_config": {"quant_method": "gptq"}}
    save_standard(described(tmp_path, config) / "ck", nested(WEIGHTS["llama"]))
    with pytest.raises(UnsupportedModel, match=r"config.json says that the weights are quantized \(gptq\)"):
        open_(tmp_path / "ck")
