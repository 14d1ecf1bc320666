"""Modules of users with their Orbax checkpoints: found by name, built, restored, served."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import own_models
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models

import jserve.load.decoder
from jserve import LLM, SamplingParams
from jserve.checkpoints.arrays.tree import flatten
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.orbax.array import StoredArray
from jserve.checkpoints.own.folder import open_arrays, read_own_text
from jserve.checkpoints.own.model import open_own, own_from_parts
from jserve.checkpoints.own.module import build_own_module
from jserve.checkpoints.own.report import inspect_own
from jserve.errors import CheckpointError, ConfigError, SourceError, UnsupportedModel
from jserve.models.naive import dense_logits, naive_generate
from jserve.models.own import for_serving
from jserve.progress import SILENT
from jserve.testing.models import tiny_llama
from jserve.testing.tokenizer import ByteTokenizer
from jserve.text.tokenizer import Tokenizer

CONFIG = {"width": 8, "inner": {"heads": 1}}
SMALL = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "program_store": False, "progress": SILENT}
PIECES = (Path(__file__).parents[2] / "oracle" / "data" / "spm_llama.model").read_bytes()
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class SmallTokenizer(Tokenizer):
    """One that fits a model of 16 tokens: the letters a to p."""

    def __init__(self):
        backend = tokenizers.Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(16)}, merges=[]))
        super().__init__(backend, eos_ids=(), bos_id=None, add_bos=False)


def my_model(width=8):
    config = own_models.Config(width=width, inner=own_models.Inner(heads=1))
    with nnx.use_eager_sharding(False):
        return own_models.MyModel(config, rngs=nnx.Rngs(3))


def made(name):
    with nnx.use_eager_sharding(False):
        return getattr(own_models, name)(nnx.Rngs(5))


def save(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


@pytest.fixture(scope="module")
def module():
    return my_model()


@pytest.fixture
def folder(tmp_path, module):
    save(tmp_path / "ck", nnx.state(module))
    (tmp_path / "ck" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "ck"


def build(name, folder=None, dtype=jnp.float32):
    return build_own_module(f"own_models:{name}", where=() if folder is None else (folder,), dtype=dtype)


# --- the module -------------------------------------------------------------------------------------------------------


def test_a_class_gets_rngs_its_config_and_the_dtype(folder):
    own = build("MyModel", folder, jnp.bfloat16)
    assert (own.name, own.takes_dtype, own.config_path) == ("MyModel", True, folder / "config.json")
    assert own.module.config == own_models.Config(width=8, inner=own_models.Inner(heads=1, scale=0.5))
    leaves = flatten(nnx.split(own.module)[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in leaves.values())
    assert ("table", "embedding") in leaves
    assert own.random == (("dropout", "rngs", "count"), ("dropout", "rngs", "key"))
    assert own.module.dropout.deterministic


def test_functions_and_linen_modules_are_targets_too(folder):
    own = build("with_dict", folder)
    assert (own.name, own.takes_dtype) == ("MyModel", False)
    assert build("without_config").config_path is None
    assert build("linen_llama").name == "LinenLlama"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_model:MyModel", r"there is no module own_model in .*; did you mean own_models\?"),
        ("own_models.inner:MyModel", r"there is no module own_models\.inner"),
        ("jserve.modles.llama:Llama", r"there is no module jserve\.modles .*; did you mean jserve\.models\?"),
        ("own_models:Mymodel", r"own_models \(.*own_models\.py\) has no Mymodel; did you mean MyModel\?"),
        ("own_models:Zzz", r"has no Zzz; it defines: Inner, Config, MyModel, with_dict"),
        ("own_models:SEVEN", "own_models:SEVEN is a int; it must be a class of, or a function"),
        ("own_models:wants_more", r"own_models:wants_more\(width, depth, rngs\) wants width, depth; jserve gives only"),
        ("own_models:MyModel", r"wants config, which is read from config\.json .*; no --checkpoint is given"),
    ],
)
def test_a_target_that_is_not_found_or_cannot_be_called_is_told_in_words(target, words, monkeypatch):
    monkeypatch.chdir(Path(own_models.__file__).parent)
    with pytest.raises(ConfigError, match=words):
        build_own_module(target, where=(), dtype=jnp.float32)


def test_what_a_target_raises_or_gives_is_told(folder):
    with pytest.raises(UnsupportedModel, match=r"raises: building it raised RuntimeError: no such luck \(.*own_models"):
        build("raises")
    with pytest.raises(UnsupportedModel, match="gives_a_dict gave a dict"):
        build("gives_a_dict")
    with pytest.raises(ConfigError, match="config is annotated as <class 'int'>"):
        build("odd_config", folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import numpi_not_there", "importing broken_NUMBER needs the module numpi_not_there, which is not installed"),
        ("1 / 0", r"importing broken_NUMBER raised ZeroDivisionError: division by zero \(.*broken_NUMBER\.py:1\)"),
        ("def f(:", r"importing broken_NUMBER raised SyntaxError: .* \(.*broken_NUMBER\.py:1\)"),
        ("raise SystemExit(3)", "importing broken_NUMBER raised SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch, text, words):
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words.replace("broken_NUMBER", name)):
        build_own_module(f"{name}:Model", where=(), dtype=jnp.float32)
    sys.modules.pop(name, None)


def test_a_module_of_the_current_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "only_here_7.py").write_text("from own_models import without_config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert build_own_module("only_here_7:without_config", where=(), dtype=jnp.float32).name == "MyModel"


def test_every_fault_of_a_config_is_named_at_once(folder):
    config = {"wdth": 8, "inner": {"heads": "two", "scales": 1}, "max_position": 1.5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        build("MyModel", folder)
    assert error.value.message.splitlines() == [
        f"{folder / 'config.json'} does not fit Config:",
        "  wdth is not known; did you mean width?",
        "  width is missing",
        "  inner.scales is not known; did you mean scale?",
        "  inner.heads is 'two': Expected `int`, got `str`",
        "  max_position is 1.5: Expected `int`, got `float`",
    ]
    for text, words in (
        ('{"width": 7, "inner": {"heads": 1}}', "Config was refused: ValueError: width is odd"),
        ("[]", "holds a list; it must be one JSON object"),
        ("{", "cannot read"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            build("MyModel", folder)


# --- the arrays -------------------------------------------------------------------------------------------------------


def pure(module):
    return nnx.to_pure_dict(nnx.state(for_serving(module)))


def managed(folder, module):
    """Two steps of a CheckpointManager, of which the first holds zeros."""
    with ocp.CheckpointManager(folder) as manager:
        zeros = jax.tree.map(jnp.zeros_like, nnx.state(module, nnx.Param))
        manager.save(2, args=ocp.args.StandardSave(zeros))
        manager.save(10, args=ocp.args.StandardSave(nnx.state(module)))
        manager.wait_until_finished()
    return folder


SAVES = {
    "state": lambda folder, module: save(folder, nnx.state(module)),
    "params": lambda folder, module: save(folder, nnx.state(module, nnx.Param)),
    "pure dict": lambda folder, module: save(folder, pure(module)),
    "train state": lambda folder, module: save(
        folder, {"params": pure(module), "opt_state": {"mu": pure(module)}, "step": 7}
    ),
    "model and optimizer": lambda folder, module: save(
        folder, {"model": nnx.state(module), "optimizer": {"count": jnp.zeros(())}}
    ),
    "manager": managed,
    "step": lambda folder, module: managed(folder.parent, module),
}


@pytest.mark.parametrize("kind", SAVES)
def test_every_way_of_saving_is_restored_onto_its_shardings(kind, module, tmp_path):
    folder = tmp_path / ("10" if kind == "step" else "ck")
    SAVES[kind](folder, module)
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=split), pure(module))
    ignored = [("dropout", "rngs", "count"), ("dropout", "rngs", "key")]
    got = open_arrays(str(folder)).restore(wanted, ignored=ignored)
    for (path, have), (same, want) in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(pure(module)), strict=True
    ):
        assert path == same
        assert have.sharding == split
        np.testing.assert_array_equal(have, want.astype(jnp.bfloat16))


def test_every_leaf_that_does_not_fit_is_named_with_both_shapes(tmp_path, module):
    params = pure(module)
    del params["qkv"][1]
    params["table"]["embedding"] = jnp.zeros((16, 9))
    params["more"] = jnp.zeros((2, 3))
    save(tmp_path / "ck", {"params": params, "step": 3})
    shape = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shape), pure(module))
    with pytest.raises(CheckpointError) as error:
        open_arrays(str(tmp_path / "ck")).restore(wanted)
    assert error.value.message.splitlines() == [
        f"{tmp_path / 'ck'} does not fit the model:",
        "  qkv.1.bias is missing: wanted [24]",
        "  qkv.1.kernel is missing: wanted [8, 24]",
        "  table.embedding: wanted [16, 8], found [16, 9]",
        "  params.more [2, 3] float32 is not of this model",
    ]


def test_the_newest_finished_step_is_taken(tmp_path, module):
    managed(tmp_path / "ck", module)
    (tmp_path / "ck" / "12.orbax-checkpoint-tmp").mkdir()
    assert open_arrays(str(tmp_path / "ck")).saved.layout.arrays == tmp_path / "ck" / "10" / "default"
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no Flax checkpoint; looked for"):
        open_arrays(str(tmp_path / "empty"))


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_lies_in_the_folder_or_at_most_two_above(tmp_path, module):
    deep = tmp_path / "a" / "b" / "c"
    save(deep, nnx.state(module))
    where = open_arrays(str(deep)).where
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert read_own_text(None, where) == (None, None)
    (tmp_path / "a" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert read_own_text(None, where)[1] == tmp_path / "a"


def test_a_tokenizer_is_named_by_its_folder_or_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        text, folder = read_own_text(path)
        assert (text.tokenizer.eos_ids, text.tokenizer.vocab_size, folder) == ((257,), 258, path)
    for path in (tmp_path / "nowhere.json", tmp_path / "nowhere" / "tokenizer.json"):
        with pytest.raises(SourceError, match=r"nowhere.* is no tokenizer: it does not exist"):
            read_own_text(path)


def test_the_very_file_that_is_named_is_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (tmp_path / "v2.json").write_text(ByteTokenizer().to_json().replace("<bos>", "<two>"))
    assert read_own_text(tmp_path / "v2.json")[0].tokenizer.backend.token_to_id("<two>") == 256
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "v3.model").write_bytes(PIECES)
    text, path = read_own_text(tmp_path / "pieces" / "v3.model")
    assert (text.tokenizer.backend.id_to_token(0), path) == ("<unk>", tmp_path / "pieces" / "v3.model")
    (tmp_path / "README.md").write_text("hello")
    for name in ("README.md", "tokenizer_config.json"):
        with pytest.raises(SourceError, match=rf"{name} is no tokenizer: files that are read are a \.json of"):
            read_own_text(tmp_path / name)


def test_the_template_and_the_sampling_beside_a_checkpoint_count(folder):
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    own = open_own(
        "own_models:MyModel",
        checkpoint=str(folder),
        tokenizer=None,
        dtype=None,
        default_dtype=jnp.float32,
        progress=SILENT,
    )
    assert (own.chat_template, own.generation) == ("{{ messages[0].content }}", {"temperature": 0.0})


# --- inspected --------------------------------------------------------------------------------------------------------


def inspected(name, folder, *, check=False):
    return inspect_own(f"own_models:{name}", checkpoint=folder and str(folder), tokenizer=None, check=check)


def test_a_module_with_its_run_is_described_with_all_that_lies_there(tmp_path, module):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state = {"params": nnx.state(module, nnx.Param), "opt_state": {"mu": jnp.ones((5, 5))}, "step": 3}
        manager.save(10, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    (tmp_path / "run" / "12.orbax-checkpoint-tmp-7").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    report = inspected("MyModel", tmp_path / "run", check=True)
    assert report.steps.taken == "10"
    assert [step.name for step in report.steps.unfinished] == ["12.orbax-checkpoint-tmp-7"]
    assert report.other_nbytes == 100 + np.asarray(3).nbytes
    assert report.nbytes == 4 * report.parameters == sum(leaf.nbytes for leaf in flatten(pure(module)).values())
    assert {finding.severity for finding in report.findings} == {"warning"}
    assert (report.problem, report.failed) == (None, False)
    assert [part.what for part in report.missing] == ["tokenizer"]
    assert str(report).splitlines()[-1] == f"jserve serve own_models:MyModel --checkpoint {tmp_path / 'run'}"


def test_a_module_alone_is_described_by_its_parameters():
    report = inspected("without_config", None)
    assert (report.path, report.layout, report.problem) == (None, "none", None)
    assert report.parameters == sum(np.prod(array.shape) for array in report.arrays)
    assert report.missing[0].fix.startswith("put into DIR of --checkpoint its tokenizer.json")


@pytest.mark.parametrize("check", [False, True])
def test_arrays_of_another_module_fail_and_are_shown(folder, check):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"width": 16}))
    report = inspected("MyModel", folder, check=check)
    assert report.failed
    assert "table.embedding: wanted [16, 16], found [16, 8]" in report.problem.message
    assert report.findings is None
    assert any(array.name.startswith("table.embedding") and array.shape == [16, 8] for array in report.arrays)


@pytest.mark.parametrize("check", [False, True])
def test_integers_are_no_parameters_of_floats(folder, module, check):
    params = pure(module)
    params["qkv"][0]["bias"] = params["qkv"][0]["bias"].astype(jnp.int32)
    save(folder / "2", params)
    report = inspected("MyModel", folder / "2", check=check)
    assert report.problem.message.splitlines()[1:] == ["  qkv.0.bias: wanted float32, found int32"]
    assert report.failed
    with pytest.raises(ConfigError, match=r"do not fit the module:\n  qkv\.0\.bias: wanted float32, found int32$"):
        own_from_parts((module, params, None), dtype=None)


@pytest.mark.parametrize(
    ("name", "severity", "other"),
    [("without_length", "error", "logits"), ("linen_without_length", "warning", "parameters")],
)
def test_a_module_without_a_length_keeps_its_other_findings(name, severity, other):
    report = inspected(name, None, check=True)
    assert report.findings[0].where == "module"
    assert (severity, other) in {(finding.severity, finding.where) for finding in report.findings[1:]}
    assert "has no max_position, itself or in its config" in report.findings[0].what
    assert (report.max_position, report.failed) == (None, True)
    assert inspected(name, None).failed is False


def test_checking_reads_every_array_once(tmp_path, module, monkeypatch):
    save(tmp_path / "ck", {"params": pure(module), "opt_state": {"mu": np.ones((7, 9), np.float32)}})
    (tmp_path / "ck" / "config.json").write_text(json.dumps(CONFIG))
    read = {}
    plain = StoredArray._read

    def counting(self, region):
        values = plain(self, region)
        read[self._name] = read.get(self._name, 0) + values.nbytes
        return values

    monkeypatch.setattr(StoredArray, "_read", counting)
    report = inspected("MyModel", tmp_path / "ck", check=True)
    assert report.digests == "all values finite"
    assert read == {array.name: array.nbytes for array in report.arrays}


@pytest.mark.parametrize("where", ["params", "opt_state"])
def test_checking_names_what_is_not_finite_wherever_it_lies(tmp_path, module, where):
    tree = {"params": pure(module), "opt_state": pure(module)}
    tree[where]["qkv"][1]["bias"] = jnp.full((24,), jnp.nan)
    save(tmp_path / "ck", tree)
    (tmp_path / "ck" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"qkv\.1\.bias holds values that are not finite numbers") as error:
        inspected("MyModel", tmp_path / "ck", check=True)
    assert len(error.value.message.splitlines()) == 2


@pytest.mark.parametrize(
    ("decoder", "template", "words"),
    [
        (decoders.WordPiece(), None, "the tokenizer's decoder is WordPiece"),
        (decoders.ByteLevel(), "{% if %}", "line 1 of the chat template"),
    ],
)
def test_text_that_cannot_be_served_is_told_by_inspect_and_before_anything_is_compiled(
    folder, monkeypatch, decoder, template, words
):
    letters = {chr(97 + i): i for i in range(16)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=letters, unk_token="a"))
    backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b", "chat_template": template}))
    report = inspected("MyModel", folder, check=True)
    assert (report.failed, report.serve) == (True, None)
    assert words in report.problem.message
    assert not any(finding.severity == "error" for finding in report.findings)
    (folder / "config.json").rename(folder / "other.json")  # arrays of which nothing is known but their tokenizer
    (missing,) = inspect(str(folder)).missing
    assert words in missing.effect
    (folder / "other.json").rename(folder / "config.json")
    monkeypatch.setattr(jserve.load.decoder, "build_engine", None)
    with pytest.raises(CheckpointError, match=words):
        LLM("own_models:MyModel", checkpoint=folder, **SMALL)


def test_an_encoder_of_ones_own_is_refused_in_words(tmp_path):
    with nnx.use_eager_sharding(False):
        save(tmp_path / "ck", pure(own_models.encoder(nnx.Rngs(0))))
    with pytest.raises(UnsupportedModel, match=r"has no logits.*, as encoders have none; .* decoders only are served"):
        LLM("own_models:encoder", checkpoint=tmp_path / "ck", **SMALL)
    (found,) = [one for one in inspected("encoder", None, check=True).findings if one.severity == "error"]
    assert "decoders only are served" in found.what


def test_a_folder_that_is_not_there_has_a_near_one(folder):
    with pytest.raises(SourceError, match=rf"ckk does not exist; did you mean {folder}\?"):
        inspected("MyModel", folder.parent / "ckk")


# --- served -----------------------------------------------------------------------------------------------------------


def test_a_module_by_name_is_served_as_its_naive_twin(folder, module):
    graphdef, state = nnx.split(for_serving(module))
    want = naive_generate(graphdef, nnx.to_pure_dict(state), [1, 2, 3], 12)
    with LLM("own_models:MyModel", checkpoint=str(folder), **SMALL) as llm:
        assert (llm.model.name, llm.model.max_model_len, llm.model.vocab_size) == ("MyModel", 64, 16)
        assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == want


def dense_greedy(module, prompt, count):
    """By ``dense_logits`` of the module as it is."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(module, jnp.asarray(tokens, jnp.int32))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["Tables", "Transforms", "After"])
def test_plain_arrays_and_transforms_of_nnx_are_served_from_memory_and_from_a_checkpoint(name, tmp_path):
    module = made(name)
    save(tmp_path / "ck", nnx.state(module))
    assert [one for one in inspected(name, tmp_path / "ck", check=True).findings if one.severity == "error"] == []
    want = dense_greedy(for_serving(module), [1, 2, 3], 8)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for arguments in ({"model": module}, {"model": f"own_models:{name}", "checkpoint": tmp_path / "ck"}):
        with LLM(**arguments, **SMALL) as llm:
            assert llm.generate([1, 2, 3], greedy)[0].token_ids == want


def test_plain_arrays_keep_their_dtype(tmp_path):
    module = made("Tables")
    state = own_from_parts((module, None, None), dtype=jnp.bfloat16).state
    assert {".".join(path): leaf.dtype.name for path, leaf in flatten(state).items() if len(path) == 1} == {
        "mask": "bool",
        "shift": "bfloat16",
        "waves": "float32",
    }


def test_what_a_checkpoint_of_params_alone_leaves_out_is_named_with_what_to_do(tmp_path):
    module = made("Tables")
    save(tmp_path / "ck", nnx.state(module, nnx.Param))
    problem = inspected("Tables", tmp_path / "ck").problem
    assert "waves is missing: wanted [64, 4]" in problem.message
    assert problem.fix.startswith("save nnx.state(module): nnx.state(module, nnx.Param) leaves out mask, shift, waves")
    with pytest.raises(ConfigError, match="mask is missing") as caught:
        own_from_parts((module, nnx.state(module, nnx.Param), None), dtype=None)
    assert caught.value.fix == "give nnx.state(module): nnx.state(module, nnx.Param) leaves out mask, shift, waves"


@pytest.mark.parametrize(
    ("name", "words", "where"),
    [
        ("Fails", r"tracing it raised KeyError: 'rows' \(.*own_models\.py:\d+\)", "layer 0"),
        ("Counts", "tracing it raised TraceContextError: Cannot mutate Variable", "module"),
    ],
)
def test_what_a_module_raises_in_programs_is_told_by_the_checker_and_at_the_start(name, words, where):
    module = made(name)
    report = inspected(name, None, check=True)
    assert where in [finding.where.removesuffix(", 1") for finding in report.findings if finding.severity == "error"]
    assert (report.failed, report.serve) == (True, None)
    with pytest.raises(UnsupportedModel, match=words):
        LLM(module, **{**SMALL, "max_num_tokens": 16})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([1], "params is a list; it must be a mapping of names to arrays"),
        ({"table": {"embedding": [jnp.ones(3)]}}, r"params has a list at table\.embedding; it must be an array"),
        ({"table": None}, "params has a NoneType at table; it must be an array"),
    ],
)
@pytest.mark.parametrize("kind", ["NNX", "Linen"])
def test_params_that_are_no_mapping_of_arrays_are_told(kind, params, words):
    module = made("Tables") if kind == "NNX" else own_models.linen_llama()
    with pytest.raises(ConfigError, match=words.replace(" at ", " at (params\\.)?")):
        own_from_parts((module, params, None), dtype=None)


def test_paths_and_objects_are_taken_where_texts_are(folder, module, tmp_path):
    with LLM("own_models:MyModel", checkpoint=folder, tokenizer=SmallTokenizer(), **SMALL) as llm:
        assert llm.generate("ab", GREEDY)[0].usage.prompt_tokens == 2
    (tmp_path / "t.json").write_text(SmallTokenizer().to_json())
    with LLM("own_models:MyModel", checkpoint=folder, tokenizer=tmp_path / "t.json", **SMALL) as llm:
        assert llm.generate("ab", GREEDY)[0].usage.prompt_tokens == 2
    with pytest.raises(SourceError, match="nowhere"):
        LLM(tmp_path / "nowhere", progress=SILENT)
    with pytest.raises(ConfigError, match=r"tokenizer SmallTokenizer: for a MODEL of the form package.module:Class"):
        LLM(folder, tokenizer=SmallTokenizer(), progress=SILENT)
    with pytest.raises(ConfigError, match=r"the tokenizer is a builtins\.int"):
        LLM("own_models:MyModel", checkpoint=folder, tokenizer=7, progress=SILENT)


class Watched(np.ndarray):
    """Says which regions of it are read."""

    def __getitem__(self, region):
        self.regions.append(region)
        return super().__getitem__(region)


def test_given_parameters_are_read_a_devices_part_at_a_time(module):
    values = np.asarray(pure(module)["table"]["embedding"]).view(Watched)
    values.regions = []
    params = pure(module)
    params["table"]["embedding"] = values
    own = own_from_parts((module, params, None), dtype=jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split), own.state)
    got = own.load(wanted)["table"]["embedding"]
    assert sorted((rows.start, rows.stop) for rows, _ in values.regions) == [(0, 8), (8, 16)]
    assert got.sharding == split
    np.testing.assert_array_equal(got, np.asarray(values).astype(jnp.bfloat16))


def test_given_arrays_that_are_in_their_place_stay_there(module):
    own = own_from_parts((module, None, None), dtype=None)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), own.state)
    got, given = own.load(wanted)["table"]["embedding"], pure(module)["table"]["embedding"]
    assert got.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


def test_the_dtype_asked_for_wins_over_that_of_a_module_without_one(folder):
    def dtypes(name, dtype):
        own = open_own(
            f"own_models:{name}",
            checkpoint=str(folder),
            tokenizer=None,
            dtype=dtype,
            default_dtype=jnp.float16,
            progress=SILENT,
        )
        return {leaf.dtype for leaf in flatten(own.state).values()}

    assert dtypes("MyModel", None) == {jnp.dtype(jnp.float16)}
    assert dtypes("with_dict", None) == {jnp.dtype(jnp.float32)}
    assert dtypes("with_dict", jnp.bfloat16) == dtypes("MyModel", jnp.bfloat16) == {jnp.dtype(jnp.bfloat16)}


def test_a_checkpoint_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="own_models:MyModel needs its arrays"):
        LLM("own_models:MyModel", progress=SILENT)
    with pytest.raises(SourceError, match="nowhere does not exist"):
        LLM("own_models:MyModel", checkpoint=str(tmp_path / "nowhere"), progress=SILENT)


def test_a_linen_llama_equals_ours_from_memory_and_from_a_train_state(tmp_path):
    prompt = list(range(3, 40))
    want = naive_generate(*tiny_llama(), prompt, 12)
    values = own_models.linen_values()
    small = SMALL | {"max_model_len": 64}
    with LLM(own_models.linen_llama(), {"params": values}, None, mesh="tensor=2", **small) as llm:
        assert llm.model.name == "LinenLlama"
        assert llm.generate(prompt, GREEDY)[0].token_ids == want
    save(tmp_path / "ck", {"params": values, "opt_state": {"mu": values}, "step": 3})
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(UnsupportedModel, match="the tokenizer has 258 ids and the model's head only 256"):
        LLM("own_models:linen_llama", checkpoint=str(tmp_path / "ck"), **small)
    (tmp_path / "tokenizer.json").unlink()
    with LLM("own_models:linen_llama", checkpoint=str(tmp_path / "ck"), **small) as llm:
        assert llm.generate(prompt, GREEDY)[0].token_ids == want


def test_linen_variables_are_taken_bare_and_what_does_not_fit_is_named():
    values = own_models.linen_values()
    del values["norm"]
    with pytest.raises(ConfigError, match=r"params\.norm is missing: wanted \[32\]"):
        LLM(own_models.linen_llama(), values, None, progress=SILENT)
    with pytest.raises(ConfigError, match="LinenLlama was built without values, and params is None"):
        LLM(own_models.linen_llama(), None, None, progress=SILENT)
