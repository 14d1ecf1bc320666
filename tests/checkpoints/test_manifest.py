"""A manifest that was changed by hand or by damage: whatever it says, what is raised is one of our errors."""

import copy
import json
import re

import pytest

import jserve.load.decoder
from jserve.checkpoints.convert import convert
from jserve.checkpoints.inspection.inspect import inspect
from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.checkpoints.open import open_checkpoint
from jserve.config import ServeConfig
from jserve.errors import CheckpointError, StartError, UnsupportedModel
from jserve.load import load
from jserve.models.llama import LlamaConfig
from jserve.testing.gguf import write_tiny_gguf

REMOVED = object()
STRANGE = (REMOVED, None, 0, -1, 10**9, 10**40, "x", [], [-1], {"kind": "linear"})
SCALING = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole checkpoint, and its manifest with every field filled."""
    base = tmp_path_factory.mktemp("made")
    write_tiny_gguf(base / "t.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "xdg"))
        convert(str(base / "t.gguf"), base / "ck")
    rewrite(base / "ck", ("config", "rope_scaling"), SCALING)
    rewrite(base / "ck", ("generation",), {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1})
    return base / "ck", (base / "ck" / MANIFEST_NAME).read_text()


@pytest.fixture
def folder(made):
    """That checkpoint, for one test to write its manifest anew."""
    path, manifest = made
    yield path
    (path / MANIFEST_NAME).write_text(manifest)


def rewrite(folder, path, value, *, of=None):
    """Write the manifest (``of``: this one) with ``value`` at ``path``."""
    file = folder / MANIFEST_NAME
    whole = json.loads(file.read_text()) if of is None else copy.deepcopy(of)
    node = whole
    for key in path[:-1]:
        node = node[key]
    if value is REMOVED:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    file.write_text(json.dumps(whole))


def paths(node, path=()):
    """Every key of nested objects."""
    for key, child in node.items():
        yield (*path, key)
        if isinstance(child, dict):
            yield from paths(child, (*path, key))


def use(folder):
    """All that a start reads of a checkpoint but its arrays, which it compares as ``inspect`` does."""
    checkpoint = open_checkpoint(str(folder))
    checkpoint.template()
    assert checkpoint.config.max_position > 0


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: "removed" if value is REMOVED else json.dumps(value))
def test_any_value_anywhere_is_read_or_refused_in_words(folder, value):
    whole = json.loads((folder / MANIFEST_NAME).read_text())
    refused = 0
    for path in paths(whole):
        rewrite(folder, path, value, of=whole)
        for read in (inspect, use):
            try:
                read(str(folder))
            except StartError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{'.'.join(path)}: {type(error).__name__}: {error}")
    assert refused


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_kv_heads", 0, "num_kv_heads is 0; allowed are 1 to"),
        ("vocab_size", -1, "vocab_size is -1; allowed are 1 to"),
        ("num_layers", 10**9, "num_layers is 1000000000; allowed are 1 to 1024"),
        ("rope_theta", 0, "rope_theta is 0"),
        ("rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05"),
        ("rope_scaling", -1, "rope_scaling"),
        ("of_another", 1, "LlamaConfig has unknown ['of_another']"),
    ],
)
def test_a_size_that_no_model_has_is_named(folder, field, value, words):
    rewrite(folder, ("config", field), value)
    for read in (inspect, use):
        with pytest.raises(UnsupportedModel, match=f"^{re.escape(str(folder / MANIFEST_NAME))}: .*{re.escape(words)}"):
            read(str(folder))


def test_a_family_that_is_not_built_is_named_with_the_file(folder):
    rewrite(folder, ("family",), "mamba")
    with pytest.raises(UnsupportedModel, match=re.escape(f"{folder / MANIFEST_NAME}: model family 'mamba' is not")):
        use(folder)


def test_a_manifest_that_is_nested_too_deeply_is_damaged(folder):
    (folder / MANIFEST_NAME).write_text('{"a":' + 100_000 * "[" + 100_000 * "]" + "}")
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME} is damaged: maximum recursion depth"):
        use(folder)


def test_what_the_family_has_a_default_for_may_be_left_out(folder, monkeypatch):
    class Stop(Exception):
        pass

    def no_engine(model, config, **options):
        raise Stop(model.max_len)

    monkeypatch.setattr(jserve.load.decoder, "build_engine", no_engine)
    rewrite(folder, ("config", "max_position"), REMOVED)
    with pytest.raises(Stop, match=f"^{LlamaConfig.max_position}$"):
        load(ServeConfig(model=str(folder), program_store=False))


@pytest.mark.parametrize(("field", "value"), [("eos_ids", [2, 272]), ("bos_id", 272)])
def test_token_ids_beyond_the_vocabulary_are_refused(folder, field, value):
    rewrite(folder, (field,), value)
    with pytest.raises(CheckpointError, match=r"eos_ids or bos_id name \[272\]; its ids go from 0 to 271"):
        use(folder)


def test_sampling_defaults_that_every_request_would_fail_with_are_refused_at_the_start(folder):
    rewrite(folder, ("generation", "temperature"), -1)
    with pytest.raises(CheckpointError, match=r"defaults of .* are not allowed: temperature is -1"):
        load(ServeConfig(model=str(folder)))
