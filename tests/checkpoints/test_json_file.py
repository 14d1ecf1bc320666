"""JSON files that anybody may have written."""

import pytest

from jserve.checkpoints.json_file import read_json_file
from jserve.errors import CheckpointError


@pytest.mark.parametrize(
    ("data", "words", "fix"),
    [
        (b'{"a": 1}', r"f\.json is larger than 7 bytes; it is no index", None),
        (b'{"a": ', r"f\.json is damaged: ", "write it again"),
        (b'"\xff"', r"f\.json is damaged: ", "write it again"),
        (b"[1]", r"f\.json is damaged: Expected `object`, got `array`", "write it again"),
        (b"[" * 9, r"f\.json is larger", None),
        (None, r"cannot read .*f\.json: No such file", None),
    ],
)
def test_what_is_wrong_is_said(tmp_path, data, words, fix):
    if data is not None:
        (tmp_path / "f.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as error:
        read_json_file(tmp_path / "f.json", dict[str, int], what="index", max_bytes=7, fix="write it again")
    assert error.value.fix == fix


def test_the_largest_is_read(tmp_path):
    (tmp_path / "f.json").write_bytes(b'{"a":1}')
    assert read_json_file(tmp_path / "f.json", dict[str, int], what="index", max_bytes=7) == {"a": 1}
