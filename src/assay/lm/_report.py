"""What a compression did, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class CompressionReport:
    """Of one compression of one model.

    Attributes
    ----------
    method
        Its name.
    settings
        It was called with.
    calibration
        Where the text came from, and how many tokens of it were used.
    seed
        That chose them.
    layers
        One dict a Linear: block, name, rank (None where the Linear was left dense), and what the method measured.
    parameters, bytes
        Of the model before and after; shared weights count once.
    cosine
        By block, of the residual stream with the original's; empty where it was not asked for.
    seconds
        The compression took.
    """

    method: str
    settings: dict[str, Any]
    calibration: str
    seed: int
    layers: list[dict[str, Any]] = field(default_factory=list)
    parameters: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    cosine: Sequence[float] = ()
    seconds: float = 0.0

    @property
    def dense(self) -> list[str]:
        """Linears that were left as they are, as the rank saves nothing."""
        return [f"{row['block']}.{row['name']}" for row in self.layers if row.get("rank") is None]

    def to_frame(self) -> pd.DataFrame:
        """A row a Linear."""
        import pandas as pd

        return pd.DataFrame(self.layers)

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "method": self.method,
            "settings": self.settings,
            "calibration": self.calibration,
            "seed": self.seed,
            "parameters": list(self.parameters),
            "bytes": list(self.bytes),
            "cosine": [float(x) for x in self.cosine],
            "seconds": self.seconds,
            "layers": self.layers,
        }

    def __str__(self) -> str:
        """A few lines for people."""
        before, after = self.parameters
        lines = [
            f"{self.method}: {before / 1e6:.1f} to {after / 1e6:.1f} million parameters "
            f"({self.bytes[0] / 1e6:.0f} to {self.bytes[1] / 1e6:.0f} MB) in {self.seconds:.0f} s",
            f"calibrated on {self.calibration}, seed {self.seed}",
        ]
        if self.dense:
            shown = ", ".join(self.dense[:3]) + (", ..." if len(self.dense) > 3 else "")
            lines.append(f"left dense, as the factors would not be smaller: {shown} ({len(self.dense)} in all)")
        if len(self.cosine):
            lines.append(
                f"cosine with the original's hidden states behind the last block: {float(self.cosine[-1]):.3f}"
            )
        return "\n".join(lines)


def size(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model and their bytes; shared ones count once."""
    them = {id(p): p for p in model.parameters()}.values()
    return sum(p.numel() for p in them), sum(p.numel() * p.element_size() for p in them)
