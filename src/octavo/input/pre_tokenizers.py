"""How text is cut into words before a byte-level BPE merges within them: `tokenizer.ggml.pre`, by name.

Rule: one table, one list of patterns each. The patterns are applied in turn, each to the pieces that
the ones before left; what a pattern matches becomes a piece, and so does what lies between. A name gets
in only where the patterns are public: those of the model's own tokenizer.json, or llama.cpp's, which
invented the names. `ignore_merges`: a word that is a token is that token, whatever the merges say
(tiktoken's rule). `adds_bos`: where the file does not say, as llama.cpp has it. `nfc`: text is
normalised first, as Qwen's tokenizer does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",)
_QWEN2 = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}",)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)

# Words in which capitals come first: "XMLHttp" is cut before "Http".
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASH}|{_SPACES}",
)
_TEKKEN = (rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS_AND_SLASH}|{_SPACES}",)

_DIGITS_APART = (r"\p{N}", *_GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, "[0-9][0-9][0-9]")
_LLAMA_CPP_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_DEEPSEEK_CODER = (
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules of one name."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The same for the tokenizers library, writing in the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_alphabet])


def _table() -> dict[str, PreTokenizer]:
    groups = {
        "default": PreTokenizer(_LLAMA_CPP_DEFAULT),
        "gpt-2 phi-2 mpt olmo jais exaone4 mellum gigachat a.x-4.0 trillion granite-docling": (
            PreTokenizer(_GPT2)
        ),
        "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer(_DIGITS_APART),
        "falcon": PreTokenizer(_FALCON),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": (
            PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
        ),
        "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer(_LLAMA3),
        "qwen2": PreTokenizer(_QWEN2, nfc=True),
        "qwen35": PreTokenizer(_QWEN35, nfc=True),
        "deepseek-r1-qwen stablelm2 megrez hunyuan grok-2 solar-open": PreTokenizer(_QWEN2),
        "gpt-4o llama4 minimax-m2": PreTokenizer(_GPT4O, ignore_merges=True),
        "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(_DEEPSEEK_V3),
    }
    return {name: rules for names, rules in groups.items() for name in names.split()}


#: tokenizer.ggml.pre -> the rules.
PRE_TOKENIZERS = _table()
