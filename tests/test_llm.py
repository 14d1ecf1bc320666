"""A model inside a Python program, on a tiny model and bytes as tokens."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import jserve.load.decoder
from jserve import LLM, SamplingParams
from jserve.checkpoints.own.model import own_from_parts
from jserve.errors import CheckpointError, ConfigError, InvalidRequest, TemplateError, Unsupported
from jserve.models.naive import naive_generate
from jserve.progress import SILENT
from jserve.request import FinishReason
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.models import tiny_llama
from jserve.testing.tokenizer import ByteTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def parts():
    graphdef, params = tiny_llama(vocab_size=ByteTokenizer().vocab_size)
    return nnx.merge(graphdef, params), params, ByteTokenizer()


@pytest.fixture(scope="module")
def llm(parts, tmp_path_factory):
    settings = {"max_num_seqs": 4, "max_num_tokens": 32, "num_pages": 64, "max_queue": 6, "program_store": False}
    with LLM(parts, **settings) as llm:
        yield llm


def test_a_start_is_told_on_stderr_unless_nobody_is_to_hear(parts, capsys):
    settings = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "program_store": False}
    LLM(parts, **settings).close()
    assert "compile 2/2 in " in capsys.readouterr().err
    LLM(parts, **settings, progress=SILENT).close()
    assert capsys.readouterr().err == ""


def test_text_and_ids_equal_the_naive_recompute(llm, parts):
    module, params, tokenizer = parts
    graphdef = nnx.split(module)[0]
    prompts = ["Once upon a time", "a", "Zoë 🙂"]
    for prompt, out in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        ids = tokenizer.encode(prompt, add_special=True)
        want = naive_generate(graphdef, params, ids, 12)
        assert out.token_ids == want[: len(out.token_ids)]
        assert len(out.token_ids) == 12 or out.token_ids[-1] in tokenizer.eos_ids
        assert out.text == tokenizer.decode(out.token_ids)
        assert out.usage.prompt_tokens == len(ids)
        assert out.usage.output_tokens == len(out.token_ids)
        for same in (ids, np.asarray(ids), [np.int32(i) for i in ids]):
            (by_ids,) = llm.generate(same, GREEDY)
            assert by_ids.token_ids == out.token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_that_carries_its_parameters_is_served_in_the_dtype_asked_for(parts, dtype):
    module, params, tokenizer = parts
    settings = {"max_num_seqs": 1, "max_num_tokens": 8, "num_pages": 8, "max_model_len": 32, "program_store": False}
    with LLM(module, None, tokenizer, dtype=dtype, **settings) as llm:
        assert llm.model.dtype == dtype
        (out,) = llm.generate([[1, 2, 3]], replace(GREEDY, ignore_eos=True))
    assert len(out.token_ids) == 12
    if dtype == "float32":  # what the parameters are; in bfloat16 close calls may go the other way
        assert out.token_ids == naive_generate(nnx.split(module)[0], params, [1, 2, 3], 12)


def test_the_dtype_told_is_the_one_that_most_bytes_have(monkeypatch):
    graphdef, params = tiny_llama(dtype=jnp.bfloat16, vocab_size=ByteTokenizer().vocab_size)
    params["token_embedding"]["weight"] = params["token_embedding"]["weight"].astype(jnp.float32)  # the first leaf
    monkeypatch.setattr(jserve.load.decoder, "build_engine", lambda *arguments, **options: FakeEngine())
    with LLM((nnx.merge(graphdef, params), None, ByteTokenizer()), program_store=False) as llm:
        assert llm.model.dtype == "bfloat16"


def test_a_module_without_values_needs_parameters(parts):
    empty = nnx.eval_shape(lambda: parts[0])
    with pytest.raises(ConfigError, match="Llama was built without values"):
        LLM((empty, None, parts[2]))


def test_many_more_prompts_than_the_queue_holds_come_back_in_order(llm):
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 5, ignore_eos=True) for i in range(40)]
    outs = llm.generate(prompts, params)
    assert [len(out.token_ids) for out in outs] == [1 + i % 5 for i in range(40)]
    assert outs[7].token_ids == llm.generate([prompts[7]], params[7])[0].token_ids


def test_choices_and_logprobs(llm):
    (out,) = llm.generate(["abc"], SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, ignore_eos=True))
    assert [choice.index for choice in out.choices] == [0, 1, 2]
    assert out.choices[0] == replace(out, choices=[])
    assert len(asdict(out)["choices"]) == 3
    assert len({tuple(choice.token_ids) for choice in out.choices}) == 3
    for choice in out.choices:
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        assert all(len(entry.top) == 2 for entry in choice.logprobs)
    assert out.usage.output_tokens == 18


def test_a_stop_string_ends_the_text_before_it(llm):
    (whole,) = llm.generate(["stop here"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    stop = whole.text[20:23]
    (cut,) = llm.generate(["stop here"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.usage.output_tokens == len(cut.token_ids) < 40


def test_one_bad_prompt_raises_and_leaves_nothing_running(llm):
    with pytest.raises(InvalidRequest, match="99999"):
        llm.generate([[1, 2], [99999], [3]], GREEDY)
    with pytest.raises(TemplateError):
        llm.generate([{"role": "user", "content": "hello"}], GREEDY)
    with pytest.raises(ValueError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate(["a"], GREEDY)[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("n", [0, 10**9, "2", 1.5, None])
def test_a_number_of_choices_that_is_not_allowed_is_refused(llm, n):
    with pytest.raises(InvalidRequest, match=r"^n is "):
        llm.generate(["a"], replace(GREEDY, n=n))


def test_a_decoder_embeds_nothing(llm):
    with pytest.raises(Unsupported, match="no encoder is served here"):
        llm.embed(["a"])


def test_unknown_settings_are_named(parts):
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM(parts, max_num_seq=3)


def test_settings_that_would_be_ignored_are_refused(parts):
    with pytest.raises(ConfigError, match="grpc_address, insecure: LLM opens no doors"):
        LLM(parts, insecure=True, grpc_address="127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"checkpoint somewhere: for a MODEL of the form package\.module:Class"):
        LLM(parts, checkpoint="somewhere")
    with pytest.raises(ConfigError, match=r"tokenizer t\.json: .*; MODEL is some/folder, which has its own"):
        LLM("some/folder", tokenizer="t.json")
    with pytest.raises(ConfigError, match="which has its own") as error:
        LLM("my_package.my_model.MyModel", checkpoint="somewhere")
    assert error.value.fix == "my_package.my_model:MyModel, with a colon, if that is meant; else leave them out"
    with pytest.raises(ConfigError, match="params go with a module"):
        LLM("some/folder", parts[1])
    with pytest.raises(ConfigError, match="these three as one tuple and nothing besides"):
        LLM(parts, parts[1])


def test_parameters_that_do_not_fit_are_named(parts, monkeypatch):
    module, params, tokenizer = parts
    cut = {**params, "norm": params["norm"][:3], "extra": params["norm"]}
    monkeypatch.setattr(jserve.load.decoder, "build_engine", None)  # nothing is compiled before it is said
    with pytest.raises(ConfigError, match=r"norm: wanted \[32\], found \[3\]\n  extra \[32\] is not of this model"):
        LLM((module, cut, tokenizer))


class SavesItself:
    """As transformers' tokenizers are: files of its own making."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text(ByteTokenizer().to_json())
        (Path(folder) / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "chat_template": "{{ messages }}"}')


class SavesNonsense(SavesItself):
    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_tokenizers_of_others_are_taken_as_they_are(parts):
    module, params, _ = parts
    own = own_from_parts((module, params, SavesItself()), dtype=None)
    assert (own.tokenizer.eos_ids, own.chat_template) == ((257,), "{{ messages }}")
    notes = []
    hears = SimpleNamespace(note=notes.append)
    backend = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    backend.enable_padding()
    own = own_from_parts((module, params, backend), dtype=None, progress=hears)
    assert own.tokenizer.encode("ab", add_special=True) == ByteTokenizer().encode("ab", add_special=True)
    assert own.tokenizer.backend is not backend
    assert (own.tokenizer.eos_ids, own.chat_template) == ((), None)
    assert notes == ["the tokenizer names no end of a text: only max_tokens and stop strings or ids end one"]


def test_what_is_no_tokenizer_is_told_by_its_type(parts):
    module, params, _ = parts
    with pytest.raises(ConfigError, match=r"the tokenizer is a builtins\.int; it may be a path"):
        LLM(module, params, 5)
    with pytest.raises(CheckpointError, match=r"the tokenizer SavesNonsense: .*\n  tokenizer\.json: not a tokenizer"):
        LLM(module, params, SavesNonsense())
