"""Generate, Tokenize, Embed and ListModels through a real server and a stock gRPC client."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jserve.request import SamplingParams
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server
from jserve.testing.fake_tokens import fake_token
from jserve.testing.waiting import wait_for
from jserve.v1 import inference_pb2 as pb
from jserve.v1 import inference_pb2_grpc


@pytest.fixture
def served():
    with fake_server() as served:
        yield served


@pytest.fixture
def stub(served):
    with grpc.insecure_channel(served.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def text_request(text, **sampling):
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


def joined(responses):
    """Ids, text and finish reason by choice; each choice must end exactly once."""
    ids, text, finish = {}, {}, {}
    for response in responses:
        i = response.index
        assert i not in finish
        ids.setdefault(i, []).extend(response.token_ids)
        text[i] = text.get(i, "") + response.text
        if response.finish_reason:
            finish[i] = response.finish_reason
    return {i: (ids[i], text[i], finish[i]) for i in ids}


def failed(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error = caught.value
    return error.code(), dict(error.trailing_metadata()).get("jserve-code"), error.details()


def test_the_deltas_of_a_request(stub):
    responses = list(stub.Generate(text_request("hello", max_tokens=5)))
    ids = [fake_token(b"hello", 0, i) for i in range(5)]
    assert joined(responses) == {0: (ids, bytes(ids).decode(), "length")}
    assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
    last = responses[-1]
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (5, 5)
    assert 0 <= last.timings.queue <= last.timings.ttft <= last.timings.total
    assert len({r.request_id for r in responses}) == 1
    assert responses[0].request_id


def test_choices_each_end_once(stub):
    responses = list(stub.Generate(text_request("ab", max_tokens=4, n=3)))
    assert joined(responses) == {
        c: (ids := [fake_token(b"ab", c, i) for i in range(4)], bytes(ids).decode(), "length") for c in range(3)
    }
    assert responses[-1].usage.output_tokens == 12


def test_token_and_chat_prompts(served, stub):
    list(stub.Generate(pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[5, 0]), request_id="mine")))
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    list(stub.Generate(pb.GenerateRequest(chat=chat)))
    first, second = served.engine.submitted
    assert first.prompt_ids == (5, 0)
    assert first.deadline is None
    assert second.prompt_ids == (256, *b"user: hi\nassistant:")


def test_zero_is_a_value_and_absent_takes_the_checkpoints_default():
    with (
        fake_server(defaults=SamplingParams(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125)) as served,
        grpc.insecure_channel(served.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        zeros = {"temperature": 0, "top_p": 0, "top_k": 0, "min_p": 0, "seed": 0, "min_tokens": 0, "logprobs": 0}
        list(stub.Generate(text_request("a", max_tokens=1, **zeros)))
        list(stub.Generate(pb.GenerateRequest(text="a")))
        given, absent = (request.sampling for request in served.engine.submitted)
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0, 0, 0, 0)
    assert (given.seed, given.max_tokens, given.logprobs) == (0, 1, 0)
    assert (absent.temperature, absent.top_p, absent.top_k, absent.min_p) == (0.5, 0.25, 7, 0.125)
    assert (absent.max_tokens, absent.logprobs, absent.n) == (511, None, 1)


def test_logprobs(stub):
    responses = list(stub.Generate(text_request("a", max_tokens=2, logprobs=2)))
    entries = [entry for response in responses for entry in response.logprobs]
    first = fake_token(b"a", 0, 0)
    assert [entry.token_id for entry in entries] == [first, first + 1]
    assert [entry.logprob for entry in entries] == [-0.125, -0.25]
    assert [(top.token_id, top.logprob) for top in entries[0].top] == [(first, -0.125), (first + 1, -1.125)]


@pytest.mark.parametrize(
    ("request_", "status", "code", "words"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "JS-REQ-01", "no prompt"),
        (text_request("", max_tokens=1), "INVALID_ARGUMENT", "JS-REQ-01", "0 tokens"),
        (text_request("a", max_tokens=0), "INVALID_ARGUMENT", "JS-REQ-01", "max_tokens is 0"),
        (text_request("a", n=17), "INVALID_ARGUMENT", "JS-REQ-01", "n is 17"),
        (text_request("a", logprobs=21), "INVALID_ARGUMENT", "JS-REQ-01", "logprobs"),
        (text_request("a", temperature=float("nan")), "INVALID_ARGUMENT", "JS-REQ-01", "temperature is nan"),
        (text_request("a", stop=["x"] * 17), "INVALID_ARGUMENT", "JS-REQ-01", "stop has 17"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[-1])), "INVALID_ARGUMENT", "JS-REQ-01", "-1"),
        (pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1] * 600)), "INVALID_ARGUMENT", "JS-REQ-02", "limit is 512"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="robot", content="a")])),
            "INVALID_ARGUMENT",
            "JS-REQ-03",
            "unknown role robot",
        ),
        (pb.GenerateRequest(text="a", model="gpt"), "NOT_FOUND", "JS-REQ-04", "'gpt' is not served here"),
        (pb.GenerateRequest(text="a", request_id="x" * 200), "INVALID_ARGUMENT", "JS-REQ-01", "request_id has 200"),
    ],
)
def test_refusals_name_what_is_wrong_and_compute_nothing(served, stub, request_, status, code, words):
    got_status, got_code, details = failed(stub.Generate(request_))
    assert (got_status.name, got_code) == (status, code)
    assert words in details
    assert served.engine.submitted == []


def test_a_live_id_is_refused_and_free_again_after_its_end(served, stub):
    served.engine.pause()
    first = stub.Generate(pb.GenerateRequest(text="a", request_id="x", sampling=pb.SamplingParams(max_tokens=2)))
    wait_for(lambda: served.engine.live > 0)
    status, code, _ = failed(stub.Generate(pb.GenerateRequest(text="a", request_id="x")))
    assert (status, code) == (grpc.StatusCode.ALREADY_EXISTS, "JS-REQ-05")
    served.engine.resume()
    assert joined(first)[0][2] == "length"
    assert joined(stub.Generate(pb.GenerateRequest(text="a", request_id="x")))[0][2] == "length"


def test_a_full_queue_says_when_to_try_again():
    engine = FakeEngine(max_num_seqs=1, max_queue=1)
    with fake_server(engine) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        engine.pause()
        kept = [stub.Generate(text_request("a", max_tokens=1))]
        wait_for(lambda: engine.live > 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(text_request("b", max_tokens=1)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = list(rpc_status.from_call(caught.value).details)
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert details[0].Unpack(info)
        assert (info.reason, info.domain) == ("JS-LIM-02", "jserve")
        assert details[1].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 1.0
        engine.resume()
        assert all(joined(call)[0][2] == "length" for call in kept)


def test_a_deadline_ends_the_request_on_the_server(served, stub):
    served.engine.pause()
    status, _, _ = failed(stub.Generate(text_request("a"), timeout=0.5))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    (request,) = served.engine.submitted
    assert 0 < request.deadline - request.arrival <= 0.5
    assert served.engine.wait_idle(2)


def test_a_cancelled_call_ends_the_request_on_the_server(stub, served):
    served.engine.token_delay_s = 0.005
    call = stub.Generate(text_request("a"))
    next(call)
    call.cancel()
    assert served.engine.wait_idle(2)
    assert len(served.engine.cancelled) == 1


def test_what_the_engine_did_before_it_failed_is_delivered_first(served, stub):
    served.engine.token_delay_s = 0.005
    call = stub.Generate(text_request("a"))
    responses = [next(call)]
    served.engine.fail("the reactor at 10.0.0.7 melted")
    with pytest.raises(grpc.RpcError) as caught:
        responses.extend(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert dict(caught.value.trailing_metadata())["jserve-code"] == "JS-SRV-02"
    assert (responses[-1].finish_reason, responses[-1].error_code) == ("error", "JS-SRV-02")
    assert responses[-1].HasField("usage")
    assert "10.0.0.7" not in caught.value.details()


def test_an_internal_error_is_generic_to_the_client_and_whole_in_the_log(served, stub, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise KeyError("/secret/path")

    monkeypatch.setattr(served.engine, "submit", broken)
    status, code, details = failed(stub.Generate(text_request("a")))
    assert (status, code) == (grpc.StatusCode.INTERNAL, "JS-INT-01")
    assert details.startswith("internal error, id ")
    assert "secret" not in details
    incident = details.split("id ")[1].split(";")[0]
    (record,) = (r for r in caplog.records if incident in r.getMessage())
    assert "/secret/path" in str(record.exc_info[1])


def test_tokenize(stub):
    response = stub.Tokenize(pb.TokenizeRequest(text="hé", model="fake"))
    assert (list(response.token_ids), response.max_model_len) == (list("hé".encode()), 512)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    assert list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids) == [256, *b"user: hi\nassistant:"]
    for request, code in (
        (pb.TokenizeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.TokenizeRequest(text="a", model="gpt"), grpc.StatusCode.NOT_FOUND),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(request)
        assert caught.value.code() is code


def test_embed_is_refused_in_words(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(pb.EmbedRequest(texts=["a"]))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "no encoder is served here" in caught.value.details()


def test_list_models(stub):
    (model,) = stub.ListModels(pb.ListModelsRequest()).models
    assert (model.name, model.dtype, model.mesh, model.max_model_len) == ("fake", "float32", "1 device", 512)
    assert (model.vocab_size, model.num_pages, model.page_size, model.has_chat_template) == (258, 1024, 16, True)


def test_64_streams_of_mixed_lengths_equal_themselves_alone(served, stub):
    def run(i):
        return joined(stub.Generate(text_request("x" * (i % 7 + 1), max_tokens=i + 1)))[0]

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(run, range(64)))
    for i, (ids, text, finish) in enumerate(results):
        assert ids == [fake_token(b"x" * (i % 7 + 1), 0, j) for j in range(i + 1)]
        assert (text, finish) == (bytes(ids).decode(), "length")
    stats = served.engine.stats()
    assert (stats.waiting, stats.running, stats.pages_in_use) == (0, 0, 0)


def test_tokens_of_one_dispatch_travel_in_one_message_a_choice():
    engine = FakeEngine(tokens_per_dispatch=8)
    with fake_server(engine) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        responses = list(stub.Generate(text_request("a", max_tokens=16, n=2)))
    assert len(responses) <= 4
    assert all(len(response.token_ids) >= 8 for response in responses)


def test_clients_that_do_not_read_lose_their_own_streams_only():
    engine = FakeEngine(max_model_len=200_000, num_pages=200_000, max_num_seqs=32, tokens_per_dispatch=64)
    with fake_server(engine, outbox_bytes=1 << 18) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = [stub.Generate(text_request("a", logprobs=20)) for _ in range(20)]
        for call in slow:
            next(call)
        assert joined(stub.Generate(text_request("b", max_tokens=100)))[0][2] == "length"
        assert engine.wait_idle(20)
        assert {failed(call)[:2] for call in slow} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "JS-LIM-03")}


def test_submit_cancel_and_submit_again_leaves_the_new_one_unharmed(served, stub):
    request = pb.GenerateRequest(text="a", request_id="x", sampling=pb.SamplingParams(max_tokens=2))
    for _ in range(100):
        stub.Generate(request).cancel()
        responses = retried(stub, request)
        assert joined(responses)[0][0] == [fake_token(b"a", 0, i) for i in range(2)]
    assert served.engine.wait_idle(2)


def retried(stub, request):
    """The responses, asked for again while the server has not yet seen that the id's former owner left."""
    responses = []

    def answered():
        try:
            responses.extend(stub.Generate(request))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            return False
        return True

    wait_for(answered)
    return responses
