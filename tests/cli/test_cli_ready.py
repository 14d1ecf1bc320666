"""What a server says once it is ready: the lines to paste do what they promise."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from jserve.cli.serve import _heeding_interrupts, describe
from jserve.config import ServeConfig
from jserve.testing.fake_engine import FakeEngine
from jserve.testing.fake_server import fake_encoder_server, fake_server
from jserve.testing.fake_tokens import fake_token


def pasted(table, capsys):
    """What the lines of Python print."""
    names = [name for name, _ in table]
    exec("\n".join(line for _, line in table[names.index("python") :]), {})  # noqa: S102
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeEngine()) as server:
        yield server


def test_a_model_with_a_tokenizer_is_asked_in_words(server, capsys):
    table = describe(server.frontend.model, server.addresses, ServeConfig())
    assert dict(table)["shell"] == f'jserve generate --address {server.grpc} "What is gravity?"'
    assert len(pasted(table, capsys)) > 10


def test_a_model_without_one_is_asked_in_token_ids(server, capsys):
    bare = replace(server.frontend.model, has_tokenizer=False, has_chat_template=False)
    table = describe(bare, server.addresses, ServeConfig())
    assert "shell" not in dict(table)  # jserve generate takes text only
    assert str(fake_token([1, 2, 3], 0, 0)) in pasted(table, capsys)


def test_an_encoder_is_given_texts(capsys):
    with fake_encoder_server() as server:
        assert "[[" in pasted(describe(server.frontend.model, server.addresses, ServeConfig()), capsys)


def test_an_interrupt_that_something_swallowed_still_ends_a_start():
    def interrupted():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt), _heeding_interrupts():
        interrupted()
