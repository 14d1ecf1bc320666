"""The blocking gRPC client against a real server."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from jserve import errors
from jserve.client import Cancel, Client, PromptRequest
from jserve.client.errors import from_rpc
from jserve.request import Delta, FinishReason, SamplingParams, ServedModel
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_server
from jserve.testing.fake_tokens import fake_logprob, fake_token


@pytest.fixture
def served():
    with fake_server() as served:
        yield served


@pytest.fixture
def client(served):
    with Client(served.grpc) as client:
        yield client


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def expected(prompt, count, choice=0):
    return [fake_token(prompt, choice, i) for i in range(count)]


def test_generate_gives_deltas(client):
    deltas = list(client.generate("hello", SamplingParams(max_tokens=5, logprobs=1), request_id="mine"))
    assert all(isinstance(delta, Delta) and delta.request_id == "mine" for delta in deltas)
    ids = expected(b"hello", 5)
    assert ids_of(deltas) == ids
    assert "".join(delta.text for delta in deltas) == bytes(ids).decode()
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert logprobs == [fake_logprob(token, i, top=1, vocab_size=258) for i, token in enumerate(ids)]
    last = deltas[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (5, 5)
    assert last.timings.total > 0
    assert all(delta.usage is None for delta in deltas[:-1])


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("é", tuple("é".encode())),
        ([7, 0, 257], (7, 0, 257)),
        ([{"role": "user", "content": "hi"}], (256, *b"user: hi\nassistant:")),
    ],
)
def test_every_kind_of_prompt(served, client, prompt, ids):
    list(client.generate(prompt, SamplingParams(max_tokens=1)))
    assert served.engine.submitted[0].prompt_ids == ids


def test_choices_and_stop_strings(client):
    deltas = list(client.generate("a", SamplingParams(n=2, max_tokens=60, stop=("xyz",))))
    for choice in range(2):
        own = [delta for delta in deltas if delta.index == choice]
        text = bytes(expected(b"a", 60, choice)).decode()
        assert "".join(delta.text for delta in own) == text[: text.index("xyz")]
        assert own[-1].finish_reason is FinishReason.STOP


def test_the_rest_of_the_service(client):
    assert client.tokenize("hé") == list("hé".encode())
    assert client.tokenize([{"role": "user", "content": "hi"}]) == [256, *b"user: hi\nassistant:"]
    assert client.models() == [
        ServedModel(
            name="fake",
            family="fake",
            dtype="float32",
            mesh="1 device",
            max_model_len=512,
            vocab_size=258,
            num_pages=1024,
            page_size=16,
            has_chat_template=True,
            has_tokenizer=True,
        )
    ]
    assert client.health() == "SERVING"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: list(c.generate("")), errors.InvalidRequest, "0 tokens"),
        (lambda c: list(c.generate([1] * 600)), errors.PromptTooLong, "600 tokens"),
        (lambda c: list(c.generate([{"role": "robot", "content": ""}])), errors.TemplateError, "unknown role"),
        (lambda c: list(c.generate("a", model="gpt")), errors.NotFound, "'gpt' is not served"),
        (
            lambda c: list(c.generate("a", SamplingParams(max_tokens=-1))),
            errors.InvalidRequest,
            "max_tokens cannot be -1",
        ),
        (lambda c: c.tokenize("a", model="gpt"), errors.NotFound, "'gpt' is not served"),
        (lambda c: c.tokenize([1, 2]), errors.InvalidRequest, "only text"),
    ],
)
def test_errors_come_back_as_their_own_class(client, call, error, words):
    with pytest.raises(error, match=words) as caught:
        call(client)
    assert type(caught.value) is error


def test_a_full_queue_carries_when_to_try_again():
    with fake_server(FakeEngine(max_num_seqs=1, max_queue=1)) as served, Client(served.grpc) as client:
        served.engine.pause()
        first = client.generate("a", request_id="x")
        while not served.engine.live:
            time.sleep(0.001)
        with pytest.raises(errors.QueueFull) as caught:
            next(client.generate("b"))
        assert caught.value.retry_after_s == 1.0
        with pytest.raises(errors.DuplicateRequest):
            next(client.generate("b", request_id="x"))
        served.engine.resume()
        assert next(first).token_ids[0] == fake_token(b"a", 0, 0)


def test_an_engine_that_fails_raises_after_its_deltas(served, client):
    served.engine.token_delay_s = 0.005
    stream = client.generate("a")
    deltas = [next(stream)]
    served.engine.fail("gone")
    with pytest.raises(errors.EngineFailed):
        deltas.extend(stream)
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert ids_of(deltas) == expected(b"a", len(ids_of(deltas)))


def test_the_timeout_is_the_deadline_of_the_request(served, client):
    served.engine.pause()
    with pytest.raises(errors.DeadlineExceeded, match=r"within 0\.5 s|the request's deadline passed"):
        list(client.generate("a", timeout=0.5))
    assert served.engine.submitted[0].deadline is not None
    assert served.engine.wait_idle(2)


def test_leaving_the_iteration_cancels_the_request(served, client):
    served.engine.token_delay_s = 0.02
    for _ in client.generate("a"):
        break
    assert served.engine.wait_idle(2)
    assert len(served.engine.cancelled) == 1


def test_a_request_that_is_never_read_is_cancelled_with_its_iterator(served, client):
    served.engine.pause()
    stream = client.generate("a")
    while not served.engine.live:
        time.sleep(0.001)
    del stream
    assert served.engine.wait_idle(2)


def test_no_server(unused_tcp_port):
    address = f"127.0.0.1:{unused_tcp_port}"
    with Client(address) as client:
        for call in (client.health, client.models, lambda: list(client.generate("a"))):
            with pytest.raises(errors.Unreachable, match=f"{address}; it is not running"):
                call()


@pytest.mark.parametrize("address", ["", "localhost", "http://localhost:80", "localhost:port"])
def test_what_is_no_address(address):
    with pytest.raises(errors.ConfigError, match="give host:port"):
        Client(address)


@pytest.mark.parametrize("size", [0, 2048])
def test_a_message_size_that_grpc_cannot_have(size):
    with pytest.raises(errors.ConfigError, match=f"max_message_mb is {size}; gRPC allows 1 to 2047"):
        Client(max_message_mb=size)


def test_a_draining_server_says_so(served, client):
    served.frontend.refuse("going away")
    with pytest.raises(errors.Draining, match="going away"):
        list(client.generate("a"))


def test_messages_larger_than_the_client_takes():
    with (
        fake_server(max_message_mb=1) as served,
        Client(served.grpc) as client,
        pytest.raises(errors.MessageTooLarge, match="larger than max"),
    ):
        list(client.generate("x" * (2 << 20)))


def test_a_unix_socket(tmp_path):
    with fake_server(grpc_address=f"unix:{tmp_path}/s") as served, Client(served.grpc) as client:
        assert client.health() == "SERVING"


def test_one_client_serves_many_threads(client):
    def run(i):
        return ids_of(client.generate("x" * (i + 1), SamplingParams(max_tokens=i + 1)))

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(run, range(32)))
    assert results == [expected(b"x" * (i + 1), i + 1) for i in range(32)]


def test_generate_stream_keeps_a_window_and_fails_alone():
    with fake_server(FakeEngine(max_queue=8)) as served, Client(served.grpc) as client:
        requests = [
            PromptRequest(prompt="x" * (i + 1), params=SamplingParams(max_tokens=i % 7 + 1), request_id=str(i))
            for i in range(100)
        ]
        requests[50] = PromptRequest(prompt="", request_id="50")
        answers = {}
        for delta in client.generate_stream(requests, window=8):
            answers.setdefault(delta.request_id, []).append(delta)
    bad = answers.pop("50")
    assert [(delta.finish_reason, delta.error_code) for delta in bad] == [(FinishReason.ERROR, "JS-REQ-01")]
    assert len(answers) == 99
    for name, deltas in answers.items():
        i = int(name)
        assert ids_of(deltas) == expected(b"x" * (i + 1), i % 7 + 1)
        assert deltas[-1].usage is not None


def test_generate_stream_cancels_by_id(served, client):
    served.engine.token_delay_s = 0.005
    begun = threading.Event()

    def requests():
        yield PromptRequest(prompt="a", request_id="long")
        begun.wait()
        yield Cancel("long")

    deltas = []
    for delta in client.generate_stream(requests()):
        deltas.append(delta)
        begun.set()
    assert deltas[-1].finish_reason is FinishReason.CANCELLED
    assert len(ids_of(deltas)) < 300


def test_leaving_generate_stream_ends_everything_and_frees_the_sender(served, client):
    served.engine.token_delay_s = 0.02
    sent = []

    def requests():
        for i in range(1000):
            sent.append(i)
            yield PromptRequest(prompt="a", request_id=str(i))

    stream = client.generate_stream(requests(), window=4)
    next(stream)
    stream.close()
    assert served.engine.wait_idle(2)
    deadline = time.monotonic() + 5
    while any("consume" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(sent) <= 6


@pytest.mark.parametrize("broken", [RuntimeError("mine"), PromptRequest(prompt=[-1.5], request_id="bad")])
def test_what_the_callers_iterable_does_is_raised_to_the_caller(client, broken):
    def requests():
        yield PromptRequest(prompt="a", params=SamplingParams(max_tokens=3), request_id="good")
        if isinstance(broken, Exception):
            raise broken
        yield broken

    deltas = []
    with pytest.raises((RuntimeError, errors.InvalidRequest)) as caught:
        deltas.extend(client.generate_stream(requests()))
    assert ids_of(deltas) == expected(b"a", 3)
    assert "mine" in str(caught.value) or "no list of token ids" in str(caught.value)


def test_naming_a_client_imports_no_server_and_no_jax():
    code = (
        "import sys, jserve.client\n"
        "assert not {'grpc', 'pyarrow'} & set(sys.modules)\n"
        "from jserve.client import Client\n"
        "print(sorted(m for m in sys.modules if m.startswith(('jserve.serving', 'jserve.engine', 'jax', 'pyarrow'))))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("words", "kind"),
    [("Locally cancelled by application!", errors.Cancelled), ("CANCELLED", errors.Draining)],
)
def test_who_cancelled_a_call_is_told(words, kind):
    """A server that closes its doors cancels what comes too late to be answered; so another one may be asked."""

    class Failed:
        code = staticmethod(lambda: grpc.StatusCode.CANCELLED)
        details = staticmethod(lambda: words)
        trailing_metadata = staticmethod(lambda: ())

    assert type(from_rpc(Failed, address="127.0.0.1:1", timeout=None)) is kind
