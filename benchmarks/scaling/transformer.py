"""Transformers whose steps are predicted: parameters, operations of arithmetic, memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LLAMA_1B", "LLAMA_7B", "Transformer"]


@dataclass(frozen=True)
class Transformer:
    """A decoder with SwiGLU and untied embeddings, trained on `tokens` of one sequence a GPU."""

    name: str
    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    tokens: int = 4096

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """The embedding, the head and the last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def units(self) -> list[int]:
        """Return the parameters of each unit, in the order of the forward: all that is in no layer is the first."""
        return [self.outer_parameters, *[self.layer_parameters] * self.layers]

    def forward_flops(self) -> list[float]:
        """Return the forward's operations of each unit: two a parameter and token, and a causal attention's scores and
        values. The embedding is a look-up. A backward takes twice as many.
        """
        attention = 2 * self.tokens**2 * self.hidden  # half of 4 s^2 h: the mask leaves out a half
        layer = 2 * self.layer_parameters * self.tokens + attention
        return [2 * self.vocabulary * self.hidden * self.tokens, *[layer] * self.layers]

    @property
    def activation_bytes(self) -> int:
        """What a backward needs without recomputation, attention's scores excepted: 34 bytes a token and hidden unit in
        each layer (Korthikanti et al. 2022, table 2, with a fused attention).
        """
        return 34 * self.tokens * self.hidden * self.layers


LLAMA_7B = Transformer("7B", 32, 4096, 11008, 32000)  # Llama 2
LLAMA_1B = Transformer("1.3B", 24, 2048, 5504, 32000)
