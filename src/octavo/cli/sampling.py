"""Sampling parameters as command-line flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from octavo.sampling_params import SamplingParams

_GROUP = Group("Sampling", sort_key=0)


def _help(text: str) -> Parameter:
    return Parameter(help=text, group=_GROUP)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """What a command-line user may ask of sampling; greedy unless told otherwise."""

    temperature: Annotated[float, _help("0 always takes the likeliest token.")] = 0.0
    top_k: Annotated[int, _help("Sample from the k likeliest tokens; 0: all.")] = 0
    top_p: Annotated[float, _help("Sample from the likeliest tokens that reach this probability.")] = 1.0
    min_p: Annotated[float, _help("Drop tokens less likely than this share of the likeliest's.")] = 0.0
    repetition_penalty: Annotated[float, _help("Above 1: shun tokens seen in prompt or output.")] = 1.0
    seed: Annotated[int | None, _help("Repeats a sampled output; drawn when not given.")] = None
    max_tokens: Annotated[
        int | None, _help("Most tokens to generate; as the context holds if not given.")
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter(help="Text that ends the output; may be given again.", group=_GROUP, negative=""),
    ] = ()

    def params(self) -> SamplingParams:
        """The engine's form of these flags."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )

    def openai_fields(self) -> dict[str, Any]:
        """The fields of a request to a server; the temperature, and what is not as by default."""
        fields: dict[str, Any] = {"temperature": self.temperature}
        for flag in dataclasses.fields(self):
            value = getattr(self, flag.name)
            if value != flag.default:
                fields[flag.name] = value
        return fields
