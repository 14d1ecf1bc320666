"""What the command line says beside its data."""

from jserve.cli.console import rows


def test_rows_are_aligned():
    assert rows([("grpc", "a:1"), ("", "more"), ("metrics", "")]) == "  grpc     a:1\n           more\n  metrics"
