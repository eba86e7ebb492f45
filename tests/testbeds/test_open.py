"""One call opens a model with its text."""

import pytest

torch = pytest.importorskip("torch")

from assay._errors import InputError  # noqa: E402
from assay.mdlm import MaskedDiffusionLM  # noqa: E402
from assay.testbeds import _open, runsum  # noqa: E402


@pytest.fixture
def opening(monkeypatch, tmp_path):
    """A folder, and what `from_checkpoint` is asked for when it is opened."""
    import transformers

    asked = {}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: object())
    monkeypatch.setattr(MaskedDiffusionLM, "from_checkpoint", lambda folder, **settings: asked.update(settings))
    return str(tmp_path), asked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_type_of_the_weights_is_left_to_the_device_unless_it_is_named(opening, device):
    folder, asked = opening
    _open.open_model(folder, device=device)
    assert asked["dtype"] is None  # which `from_checkpoint` takes as bfloat16 on a GPU, float32 on the CPU
    _open.open_model(folder, device=device, dtype="bfloat16")
    assert (asked["dtype"], asked["device"]) == ("bfloat16", device)


def test_a_worksheet_is_read_and_written_in_its_signs():
    opened = _open.open_model("runsum-dlm")
    problems = runsum.problems("easy", 1)
    assert torch.equal(opened.encode(runsum.text(problems.prompts[0])), problems.prompts[0])
    answer = opened.decode(problems.answers[0])
    assert problems.answers[0].tolist()[: len(answer) + 1] == [*runsum.tokens(answer).tolist(), runsum.EOS]
    with pytest.raises(InputError, match="takes no chat"):
        opened.encode([{"role": "user", "content": "1"}])
    with pytest.raises(InputError, match="no tokens"):
        opened.encode("")


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(InputError, match="there is no folder nowhere: give that of a checkpoint, or one of runsum-dlm"):
        _open.open_model("nowhere")
