"""GenerateStream: many requests over one stream, each on its own."""

import queue
import time

import grpc
import pytest

from jserve.serving.grpc import exchange
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


def generate(request_id, text="a", **sampling):
    request = pb.GenerateRequest(request_id=request_id, text=text, sampling=pb.SamplingParams(**sampling))
    return pb.GenerateStreamRequest(generate=request)


def cancel(request_id):
    return pb.GenerateStreamRequest(cancel=request_id)


def by_id(responses):
    """Responses by request id, in order; the one with usage must be the last of its request."""
    grouped = {}
    for response in responses:
        group = grouped.setdefault(response.request_id, [])
        assert not group or not group[-1].HasField("usage")
        group.append(response)
    assert all(group[-1].HasField("usage") and group[-1].HasField("timings") for group in grouped.values())
    return grouped


def ids_of(responses):
    return [token for response in responses for token in response.token_ids]


class Sender:
    """The client's half of a stream, sent step by step."""

    def __init__(self, stub):
        self._queue = queue.SimpleQueue()
        self.call = stub.GenerateStream(iter(self._queue.get, None))

    def send(self, *messages):
        for message in messages:
            self._queue.put(message)

    def close(self):
        self._queue.put(None)


def test_50_requests_one_invalid_half_closed_at_once(served, stub):
    messages = [generate(str(i), "x" * (i + 1), max_tokens=i % 5 + 1, n=i % 3 + 1) for i in range(50)]
    messages[25] = generate("25", temperature=-1)
    grouped = by_id(stub.GenerateStream(iter(messages)))
    assert sorted(grouped, key=int) == [str(i) for i in range(50)]
    (bad,) = grouped.pop("25")
    assert (bad.finish_reason, bad.error_code) == ("error", "JS-REQ-01")
    assert "temperature is -1" in bad.error
    for name, responses in grouped.items():
        i = int(name)
        for choice in range(i % 3 + 1):
            own = [response for response in responses if response.index == choice]
            assert ids_of(own) == [fake_token(b"x" * (i + 1), choice, j) for j in range(i % 5 + 1)]
            assert [r.finish_reason for r in own if r.finish_reason] == ["length"]
            assert own[-1].finish_reason == "length"
    assert served.engine.live == 0
    assert served.frontend.live == 0


def test_an_empty_stream_ends_well(stub):
    assert list(stub.GenerateStream(iter([]))) == []


@pytest.mark.parametrize(
    ("message", "words"),
    [(pb.GenerateStreamRequest(), "set generate or cancel"), (generate(""), "this one has none")],
)
def test_messages_without_a_request_fail_alone(stub, message, words):
    grouped = by_id(stub.GenerateStream(iter([message, generate("good", max_tokens=1)])))
    (bad,) = grouped[""]
    assert (bad.finish_reason, bad.error_code) == ("error", "JS-REQ-01")
    assert words in bad.error
    assert grouped["good"][-1].finish_reason == "length"


def test_a_live_id_is_refused_in_the_stream(served, stub):
    served.engine.pause()
    sender = Sender(stub)
    sender.send(generate("x", max_tokens=1), generate("x", max_tokens=1))
    refused = next(sender.call)
    assert (refused.finish_reason, refused.error_code) == ("error", "JS-REQ-05")
    served.engine.resume()
    assert next(sender.call).finish_reason == "length"
    sender.send(generate("x", max_tokens=1))
    assert next(sender.call).finish_reason == "length"
    sender.close()
    assert list(sender.call) == []


def test_cancel_by_id_ends_one_request(served, stub):
    served.engine.token_delay_s = 0.005
    sender = Sender(stub)
    sender.send(generate("long"), generate("short", max_tokens=20))
    first = next(sender.call)
    sender.send(cancel("long"), cancel("unknown"), cancel(""))
    sender.close()
    grouped = by_id([first, *sender.call])
    assert grouped["long"][-1].finish_reason == "cancelled"
    assert 0 <= len(ids_of(grouped["long"])) < 200
    assert grouped["short"][-1].finish_reason == "length"
    assert len(ids_of(grouped["short"])) == 20


def test_a_cancel_right_behind_its_request_is_not_lost(served, stub):
    served.engine.token_delay_s = 0.005
    messages = [message for i in range(20) for message in (generate(str(i)), cancel(str(i)))]
    grouped = by_id(stub.GenerateStream(iter(messages)))
    assert {responses[-1].finish_reason for responses in grouped.values()} == {"cancelled"}
    assert len(grouped) == 20


def test_a_cancelled_id_may_be_used_again_at_once(served, stub):
    served.engine.token_delay_s = 0.001
    messages = [message for _ in range(100) for message in (generate("x"), cancel("x"))]
    responses = list(stub.GenerateStream(iter([*messages, generate("x", max_tokens=2)])))
    ends = [response.finish_reason for response in responses if response.HasField("usage")]
    assert ends == ["cancelled"] * 100 + ["length"]
    last = len(responses) - next(i for i, r in enumerate(responses[-2::-1]) if r.HasField("usage")) - 1
    assert ids_of(responses[last:]) == [fake_token(b"a", 0, i) for i in range(2)]


def test_the_requests_of_a_stream_are_bounded():
    engine = FakeEngine(max_queue=1000)
    with fake_server(engine) as served, grpc.insecure_channel(served.grpc) as channel:
        sender = Sender(inference_pb2_grpc.InferenceStub(channel))
        engine.pause()
        sender.send(*(generate(str(i), max_tokens=1) for i in range(exchange.MAX_LIVE + 1)))
        refused = next(sender.call)
        assert (refused.request_id, refused.error_code) == (str(exchange.MAX_LIVE), "JS-LIM-02")
        engine.resume()
        sender.close()
        grouped = by_id(sender.call)
    assert len(grouped) == exchange.MAX_LIVE
    assert {responses[-1].finish_reason for responses in grouped.values()} == {"length"}


def test_a_client_that_leaves_ends_all_its_requests(served, stub):
    served.engine.token_delay_s = 0.005
    sender = Sender(stub)
    sender.send(*(generate(str(i)) for i in range(20)))
    next(sender.call)
    sender.call.cancel()
    sender.close()
    assert served.engine.wait_idle(2)
    wait_for(lambda: served.frontend.live == 0)
    assert served.engine.stats().pages_in_use == 0


def test_an_internal_error_fails_its_request_alone(served, stub, monkeypatch, caplog):
    submit = served.engine.submit

    def broken(request, sink):
        if request.request_id.startswith("bad"):
            raise KeyError("/secret/path")
        submit(request, sink)

    monkeypatch.setattr(served.engine, "submit", broken)
    grouped = by_id(stub.GenerateStream(iter([generate("bad"), generate("good", max_tokens=3)])))
    (bad,) = grouped["bad"]
    assert (bad.finish_reason, bad.error_code) == ("error", "JS-INT-01")
    assert "secret" not in bad.error
    assert "/secret/path" in caplog.text
    assert len(ids_of(grouped["good"])) == 3


def test_a_failed_engine_fails_the_requests_in_the_stream(served, stub):
    served.engine.pause()
    sender = Sender(stub)
    sender.send(generate("a"), generate("b"))
    wait_for(lambda: served.engine.live == 2)
    served.engine.fail("out of memory")
    sender.send(generate("c"))
    sender.close()
    grouped = by_id(sender.call)
    assert {responses[-1].error_code for responses in grouped.values()} == {"JS-SRV-02"}
    assert sorted(grouped) == ["a", "b", "c"]


def test_the_deadline_of_the_call_ends_its_requests(served, stub):
    served.engine.pause()
    call = stub.GenerateStream(iter([generate("a"), generate("b")]), timeout=0.6)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.engine.wait_idle(2)
    assert all(request.deadline is not None for request in served.engine.submitted)


def test_a_client_that_writes_much_before_it_reads_gets_every_answer(served, stub):
    sent = [generate(str(i), max_tokens=1) for i in range(2000)]
    call = stub.GenerateStream(iter(sent))
    time.sleep(0.5)
    grouped = by_id(call)
    assert len(grouped) == 2000
    assert {responses[-1].error_code for responses in grouped.values()} <= {"", "JS-LIM-02"}
