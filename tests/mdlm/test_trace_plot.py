"""A picture of a decoding has a cell for each position, and the step in it."""

import pytest

torch = pytest.importorskip("torch")

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    DecodingTrace,
    DiffusionGenerationConfig,
    Sequential,
    diffusion_generate,
    trace_picture,
)

from .tiny import tiny  # noqa: E402


def decoded(**settings):
    config = DiffusionGenerationConfig(**{"max_new_tokens": 6, "eos_policy": "none", "return_trace": True, **settings})
    return diffusion_generate(tiny(), torch.tensor([[1, 2, 3]]), config, Sequential())


def numbers(axis):
    return [text.get_text() for text in axis.texts if text.get_text().isdigit()]


def test_each_position_shows_its_step():
    figure = trace_picture({"left to right": decoded(), "two a step": decoded(steps=3)}, signs=list("abcd\ne$"))
    (axis,) = figure.axes
    assert numbers(axis) == ["1", "2", "3", "4", "5", "6", "1", "1", "2", "2", "3", "3"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["left to right", "two a step"]
    assert "↵" in [text.get_text() for text in axis.texts]
    assert len(axis.patches) == 12


def test_signs_that_no_font_has_become_dots_and_dollars_are_no_formula(recwarn):
    signs = ["\x00", "a\x07", "\x1b[31m", "$", "$x$"]
    figure = trace_picture({"x": decoded()}, signs=[*signs, "\u200b"], title="$5 and $")
    figure.canvas.draw()
    assert [text.get_text() for text in figure.axes[0].texts[-6:]] == ["·", "a·", "·[…", "$", "$x$", "·"]
    assert not recwarn.list


def test_what_the_eos_rule_filled_is_empty():
    steps = torch.tensor([[-1, -1, 1, 2, 0, 0]])
    trace = DecodingTrace(steps=steps, logp=torch.zeros(1, 6, dtype=torch.float64), tokens=torch.zeros_like(steps))
    (axis,) = trace_picture({"x": trace}, title="A decoding").axes
    assert numbers(axis) == ["1", "2"]
    assert [patch.get_facecolor()[3] for patch in axis.patches] == [1, 1, 0, 0]


def test_long_answers_go_on_below(tmp_path):
    steps = torch.arange(1, 151)[None]
    trace = DecodingTrace(steps=steps, logp=torch.zeros(1, 150, dtype=torch.float64), tokens=torch.zeros_like(steps))
    figure = trace_picture({"x": trace})
    assert [len(axis.patches) for axis in figure.axes] == [64, 64, 22]
    figure.savefig(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error():
    with pytest.raises(InputError, match="at least one"):
        trace_picture({})
    with pytest.raises(InputError, match="return_trace=True"):
        trace_picture({"x": decoded(return_trace=False)})
