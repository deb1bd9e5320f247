"""Text to token ids and back, for one model. No torch.

Knows the `tokenizers` package and the files that describe a tokenizer: a Hugging Face folder's tokenizer.json
and tokenizer_config.json, or a GGUF header. Does not know chats (template.py) or streams (detokenizer.py).
Token ids are int32 little-endian `bytes`, here as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import ModelError
from engine.model.gguf import GgufFile
from engine.model.library import ModelFiles
from engine.text.gguf_vocab import adds_bos, build_tokenizer
from engine.text.pieces import Spelling, spelling_of

#: What ends a turn where a GGUF header names only the end of a document; counted if they are control tokens.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer.

    special_tokens: what chat templates call bos_token, eos_token, …  eos_ids: the ids that end a reply, as
    far as the tokenizer's files say (the model's config may know more).  vocab_size: highest id + 1.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
        eos_ids: Iterable[int] = (),
        where: str = "the tokenizer",
    ) -> None:
        self._backend = backend
        self._prefix = np.asarray(prefix, "<i4").tobytes()
        self._suffix = np.asarray(suffix, "<i4").tobytes()
        self._bytes: dict[int, bytes] = {}
        self.spelling: Spelling = spelling_of(backend, where)
        self.special_tokens = dict(special_tokens)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size = 1 + max([backend.get_vocab_size(with_added_tokens=True) - 1, *self._added])

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self._backend.get_added_tokens_decoder())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that a decoded text leaves out: the template's and the model's marks, not text."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def bos_id(self) -> int | None:
        text = self.special_tokens.get("bos_token")
        return None if text is None else self.token_id(text)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def encode(self, text: str, *, add_special: bool = False) -> bytes:
        """Token ids of `text` (int32 LE). Special tokens written in the text are parsed, since chat templates
        write them; `add_special` puts the model's own BOS (and EOS) around it. Lone surrogates become U+FFFD.

        The batch call is the one that lets go of the GIL: from a worker thread, a long text stops nobody.
        """
        try:
            found = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # the package refuses lone surrogates, and calls that a type
            found = self._backend.encode_batch_fast([_without_surrogates(text)], add_special_tokens=False)
        ids = np.asarray(found[0].ids, "<i4").tobytes()
        return self._prefix + ids + self._suffix if add_special else ids

    def decode(self, ids: bytes, skip_special: bool = True) -> str:
        """The whole text of `ids`; bytes that are no UTF-8 become U+FFFD, and ids beyond the vocabulary
        nothing.
        """
        data = self.join(np.frombuffer(ids, "<i4").tolist(), skip_special)
        if self.spelling.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def join(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """The bytes of `ids`, one behind the other."""
        skip = self.special_ids if skip_special else ()
        return b"".join([self.token_bytes(i) for i in ids if i not in skip])

    def token_bytes(self, token: int) -> bytes:
        """What one id stands for; b"" beyond the vocabulary (models pad theirs)."""
        if (found := self._bytes.get(token)) is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def token_text(self, token: int) -> str:
        """One id as text for showing; a part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _look_up(self, token: int) -> bytes:
        text = self._backend.id_to_token(token) if token >= 0 else None
        return b"" if text is None else self.spelling.to_bytes(text)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model on this disk. Raises ModelError saying which file is missing or wrong."""
    try:
        if files.kind == "gguf":
            return tokenizer_from_metadata(GgufFile(files.path).metadata, str(files.path))
        return tokenizer_from_folder(files.path)
    except ModelError:
        raise
    except BaseException as error:
        # A file may hold anything where a list of tokens or merges should be. The tokenizers package raises a bare
        # Exception for that, or panics, which is a BaseException of a type that it does not export.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{files.path}: no tokenizer can be made of what is there "
                         f"({type(error).__name__}: {str(error)[:200]}). Download it again.") from None


def tokenizer_from_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """From a GGUF header's values."""
    backend = build_tokenizer(metadata, where)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    bos, eos = ids["bos_token"], ids["eos_token"]
    for token in (bos, eos):
        if token is not None and not 0 <= token < len(tokens):
            raise ModelError(f"{where} names token {token} as its BOS or EOS, and has {len(tokens)} tokens. Download "
                             "it again.")
    control = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ends = [eos, metadata.get("tokenizer.ggml.eot_token_id"), metadata.get("tokenizer.ggml.eom_token_id"),
            *(control.get(text) for text in END_OF_TURN)]
    prefix = (bos,) if bos is not None and adds_bos(metadata, where) else ()
    suffix = (eos,) if eos is not None and metadata.get("tokenizer.ggml.add_eos_token") else ()
    return Tokenizer(
        backend, special_tokens=special, prefix=prefix, suffix=suffix,
        eos_ids=[i for i in ends if i is not None], where=where)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From tokenizer.json, with what tokenizer_config.json and generation_config.json add."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json. Save it once with Transformers "
            "(`AutoTokenizer.from_pretrained(…).save_pretrained(…)`), or use a GGUF file of the model.")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise ModelError(f"{path} can't be read: {error}. Download it again.") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    _add_tokens(backend, config)
    special = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    prefix, suffix = _around(backend, config, special)
    ends = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    generation = read_json(folder / "generation_config.json").get("eos_token_id")
    ends += generation if isinstance(generation, list) else [generation]
    return Tokenizer(
        backend, special_tokens=special, prefix=prefix, suffix=suffix,
        eos_ids=[i for i in ends if i is not None], where=str(folder))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file. Raises ModelError when it is broken."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}. Download it again.") from None
    return value if isinstance(value, dict) else {}


def _around(
    backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before and behind a text: the post-processor's, unless add_bos_token / add_eos_token say.
    """
    inside = backend.encode("x", add_special_tokens=False).ids
    whole = backend.encode("x", add_special_tokens=True).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(inside)] == inside), 0)
    prefix, suffix = tuple(whole[:at]), tuple(whole[at + len(inside) :])
    for key, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        if (said := config.get(key)) is None:
            continue
        found = backend.token_to_id(special[name]) if said and name in special else None
        ids = () if found is None else (found,)
        prefix, suffix = (ids, suffix) if name == "bos_token" else (prefix, ids)
    return prefix, suffix


def _add_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """tokenizer_config.json may add tokens, or change flags, after tokenizer.json was written."""
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False), lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False), normalized=entry.get("normalized", True),
            special=entry.get("special", False))
        old = known.get(int(key))
        if old is None or _flags(old) != _flags(token):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _flags(token: AddedToken) -> tuple[Any, ...]:
    return token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special


def _content(value: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
