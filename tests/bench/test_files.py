"""Files appear whole or not at all, and only where a file may be."""

import os
import stat
import sys

import pytest

from assay._errors import InputError
from assay.bench._files import whole_file


def test_a_file_takes_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with whole_file(path) as file:
        file.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write_text(f"half, then {1 // 0}")
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["a.txt"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_a_pipe_is_written_into_and_a_link_keeps_pointing(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as file:
        file.write_text("said")
    assert os.read(reader, 9) == b"said"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with whole_file(link) as file:
        file.write_text("there")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "there"


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder: name a file in it"), whole_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
