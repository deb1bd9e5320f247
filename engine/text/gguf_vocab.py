"""A `tokenizers.Tokenizer` out of a GGUF header's metadata. No torch.

Knows llama.cpp's key names and which pre-tokenizer each of its names stands for; what is built splits text
as the model's own tokenizer.json does (that of Qwen normalises to NFC, which llama.cpp leaves out). An
unknown model or pre-tokenizer is refused by name: a tokenizer that is nearly right is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError

#: llama.cpp's token types (its `llama_token_type`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging. `split` None is GPT-2's own expression, after digits one by one if
    asked.

    `whole_words` takes a word that is in the vocabulary as it is, without merging (tokenizer.json's
    `ignore_merges`); `add_bos` is what holds when the header does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.split is not None:
            return pre_tokenizers.Sequence([
                pre_tokenizers.Split(Regex(self.split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.digits:
            return byte_level
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA_3 = PreTokenizer(_LLAMA3, whole_words=True, add_bos=True)
_QWEN_2 = PreTokenizer(_QWEN2, nfc=True)
#: tokenizer.ggml.pre -> what it means. A header without the key is an old one, and is read as GPT-2's.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, add_bos=True),
}


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the header describes. Raises ModelError naming what `where` has and what is known.
    """
    model = str(metadata.get("tokenizer.ggml.model", "none"))
    if "tokenizer.ggml.tokens" not in metadata or model == "none":
        raise ModelError(f"{where} has no vocabulary in its header. Use a GGUF that was converted with one.")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, pre_tokenizer_of(metadata, where))
    elif model == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(
            f"{where} has a tokenizer of kind {model!r}; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE) can be built. Use the model's Hugging Face folder; its tokenizer.json needs no rebuilding.")
    _add_tokens(tokenizer, metadata)
    return tokenizer


def pre_tokenizer_of(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where} has the pre-tokenizer {name!r}, which is not known here; known are "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face folder; its tokenizer.json needs no "
            "rebuilding.")
    return PRE_TOKENIZERS[name]


def adds_bos(metadata: Mapping[str, Any], where: str) -> bool:
    """Whether a text begins with BOS: as the header says, else as llama.cpp does for this tokenizer."""
    if (said := metadata.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(said)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return pre_tokenizer_of(metadata, where).add_bos


def _byte_level(metadata: Mapping[str, Any], pre: PreTokenizer) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = _ids(tokens)
    merges = sentencepiece_merges(tokens, metadata["tokenizer.ggml.scores"], vocab)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def sentencepiece_merges(
    tokens: list[str], scores: Iterable[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first: what SentencePiece tries, as ranked
    merges.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(tokens, scores, strict=False):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _ids(tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are special (a decoded text leaves them out); user-defined ones are text found whole."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    whole = [t for t, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
