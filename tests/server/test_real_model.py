"""A server with the model that `octavo serve` starts with."""

from __future__ import annotations

from pathlib import Path

from openai import OpenAI

from serving import serve


def test_the_capital_of_france(smollm2_path: Path) -> None:
    with (
        serve(smollm2_path, "--max-model-len", "1024") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        stream = client.chat.completions.create(
            model=smollm2_path.stem,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert "Paris" in text
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens < 40
