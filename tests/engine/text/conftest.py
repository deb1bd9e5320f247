"""What the text tests read: the shared tokenizers, templates and transcripts, and SmolLM2 if it is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_helpers import shared

from engine.model.library import ModelFiles
from engine.text.template import ChatTemplate, load_template
from engine.text.tokenizer import Tokenizer, load_tokenizer

SESSIONS = 12


@pytest.fixture(scope="session")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="session")
def smollm2_template(smollm2_files: ModelFiles, smollm2: Tokenizer) -> ChatTemplate:
    return load_template(smollm2_files, None, smollm2)


@pytest.fixture(scope="session")
def transcripts() -> list[list[dict[str, Any]]]:
    """Sessions of real agents: system, user, assistant with and without calls, tool."""
    sessions = json.loads(shared("traces/taubench_airline.json").read_text(encoding="utf-8"))
    return [session["traj"] for session in sessions[:SESSIONS]]


@pytest.fixture(scope="session")
def tools(transcripts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A definition for each tool that the transcripts call (tau-bench does not record its own)."""
    calls = [c for t in transcripts for m in t for c in m.get("tool_calls") or ()]
    names = sorted({call["function"]["name"] for call in calls})
    return [
        {"type": "function", "function": {
            "name": name, "description": f"What {name.replace('_', ' ')} does.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string", "description": "Its id."}}}}}
        for name in names]
