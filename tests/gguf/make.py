"""Makes small GGUF files with the package gguf, and says what a reader must find in them.

    python make.py DIR [--plain]

Writes DIR/types.gguf (llama, a tensor of every block format), DIR/pieces.gguf (llama, SentencePiece), DIR/qwen3.gguf,
DIR/qwen35.gguf and DIR/expected.json: for each file the first 16 digits of the SHA-256 of every parameter's numbers in f32 under march's name for it, and the ids of a few texts. With
--plain, all tensors are in f32. The files in crates/lm/tests/fixtures/gguf are what this wrote without it.

The order of rows in a file is that of llama.cpp's converter, written here a second time.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType, quants
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {  # as in the models' own tokenizer.json
    "llama-bpe": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}",
    "qwen35": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}",
}
TEXTS = [
    "the sea and the stars, and then the rest",
    "  Two spaces; it's 2026, WE'LL see 12345678.\n\n\tA tab.\r\nThe end  ",
    "<|im_start|>user\nwhat is this?<|im_end|>\n<think>nothing</think>",
    "naïve cafe\u0301 हिन्दी 漢字 — ½ 🙂🙂",
]
MERGES = ["t h", "th e", "Ġ the", "a n", "an d", "Ġ and", "s t", "Ġ st", "r s", "a rs", "Ġst ars", "Ċ Ċ", "Ã ¯", "1 2"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class File:
    """A GGUF file, and the numbers that its parameters have."""

    def __init__(self, path, architecture, plain, seed):
        self.writer = GGUFWriter(path, architecture)
        self.plain, self.random, self.expected = plain, np.random.default_rng(seed), {}

    def draw(self, *shape, scale=1.0):
        """Numbers that f16 and bf16 hold exactly."""
        return (np.round(self.random.standard_normal(shape) * 32) / 32 * scale).astype(np.float32)

    def blocks(self, shape, kind):
        """Random blocks of a kind that the package cannot quantise to, as bytes."""
        size = {Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210}[kind]
        count = shape[0] * shape[1] // 256
        raw = self.random.integers(0, 256, (count, size), dtype=np.uint8)
        half = lambda: self.random.uniform(0.0005, 0.002, count).astype(np.float16).view(np.uint8).reshape(count, 2)
        for at in [208] if kind == Type.Q6_K else [0, 2]:
            raw[:, at : at + 2] = half()
        return raw.reshape(shape[0], -1)

    def tensor(self, name, numbers, kind=Type.F32):
        """Adds a tensor; gives its numbers as a reader must find them."""
        if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
            raw = self.blocks(numbers.shape, kind)
        elif kind == Type.F16:
            raw = numbers.astype(np.float16)
        else:
            raw = quants.quantize(numbers, kind)
        found = quants.dequantize(raw, kind).astype(np.float32).reshape(numbers.shape)
        if self.plain or kind == Type.F32:
            self.writer.add_tensor(name, found)
        else:
            self.writer.add_tensor(name, raw, raw_dtype=None if kind == Type.F16 else kind)
        return found

    def parameter(self, name, numbers):
        self.expected[name] = hashlib.sha256(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).hexdigest()[:16]

    def close(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def spelled():
    """The characters that stand for the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def tokenizer(file, pre, count):
    """Adds a tokenizer with `count` ids; gives the one that its tokenizer.json would describe."""
    tokens = list(spelled().values()) if count > 256 else ["Ġ", "Ċ", *map(chr, range(97, 123)), *".,'<|>_012"]
    kept = []
    for merge in MERGES:
        a, b = merge.split()
        if a in tokens and b in tokens and a + b not in tokens:
            tokens.append(a + b)
            kept.append((a, b))
    added = [("<|endoftext|>", TokenType.CONTROL), ("<|im_start|>", TokenType.CONTROL)]
    added += [("<|im_end|>", TokenType.CONTROL), ("<think>", TokenType.USER_DEFINED), ("</think>", TokenType.USER_DEFINED)]
    types = [TokenType.NORMAL] * len(tokens) + [kind for _, kind in added]
    names = tokens + [name for name, _ in added]
    assert len(names) <= count, len(names)
    while len(names) < count:
        names.append(f"[PAD{len(names)}]")
        types.append(TokenType.UNUSED)
    ids = {name: i for i, name in enumerate(names)}
    own = Tokenizer(models.BPE(vocab={name: ids[name] for name in tokens}, merges=kept, ignore_merges=pre == "llama-bpe"))
    own.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS[pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    own.decoder = decoders.ByteLevel()
    if pre != "llama-bpe":
        own.normalizer = normalizers.NFC()
    for name, kind in added:
        token = AddedToken(name, normalized=False, special=kind == TokenType.CONTROL)
        (own.add_special_tokens if token.special else own.add_tokens)([token])
        assert own.token_to_id(name) == ids[name]
    writer = file.writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in kept])
    writer.add_bos_token_id(ids["<|im_start|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template(TEMPLATE)
    return own


class Pieces:
    """SentencePiece's algorithm: of all neighbours that are a token together, those with the highest score merge."""

    def __init__(self, names, scores, added):
        self.ids, self.scores, self.added = {name: i for i, name in enumerate(names)}, scores, added

    def encode(self, text, add_special_tokens=False):
        self.id_list = []
        for part in re.split("(" + "|".join(map(re.escape, self.added)) + ")", text):
            if part in self.added:
                self.id_list.append(self.ids[part])
            elif part:
                self.part(list("▁" + part.replace(" ", "▁")))
        return SimpleNamespace(ids=self.id_list)

    def part(self, symbols):
        score = lambda i: self.scores[self.ids[symbols[i] + symbols[i + 1]]]
        while pairs := [i for i in range(len(symbols) - 1) if symbols[i] + symbols[i + 1] in self.ids]:
            best = max(pairs, key=lambda i: (score(i), -i))
            symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
        for symbol in symbols:
            own = [self.ids[symbol]] if symbol in self.ids else [self.ids[f"<0x{b:02X}>"] for b in symbol.encode()]
            self.id_list.extend(own)


def sentence_pieces(file, count):
    """Adds a SentencePiece tokenizer with `count` ids; gives its algorithm."""
    added = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    names = ["<unk>", *added[:2], *(f"<0x{b:02X}>" for b in range(256)), *added[2:]]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 256 + [TokenType.CONTROL] * 2
    pieces = [*"▁abcdefghilmnorstuwy.,;", "th", "he", "the", "▁t", "▁th", "▁the", "an", "nd", "and", "▁a", "▁and"]
    pieces += ["st", "ar", "rs", "star", "stars", "▁s", "▁stars", "▁▁", "is", "é", "漢"]
    names, types = names + pieces, types + [TokenType.NORMAL] * len(pieces)
    assert len(names) <= count, len(names)
    while len(names) < count:
        names.append(f"[PAD{len(names)}]")
        types.append(TokenType.UNUSED)
    # No two pieces have the same score, and longer pieces do not always have lower ones.
    scores = [0.0] * 261 + [-float(x) for x in file.random.permutation(count - 261)]
    writer = file.writer
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(names.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)
    return Pieces(names, scores, added)


def common(file, vocab, hidden, inner, layers, heads, kv, width):
    writer = file.writer
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    file.parameter("model.embeddings.weight", file.tensor("token_embd.weight", file.draw(vocab, hidden), file.kinds["embd"]))
    file.parameter("model.norm.weight", file.tensor("output_norm.weight", 1 + file.draw(hidden, scale=0.25)))


def feed_forward(file, layer, hidden, inner, norm):
    file.parameter(f"model.layers.{layer}.attn_norm.weight", file.tensor(f"blk.{layer}.attn_norm.weight", 1 + file.draw(hidden, scale=0.25)))
    file.parameter(f"model.layers.{layer}.mlp_norm.weight", file.tensor(f"blk.{layer}.{norm}.weight", 1 + file.draw(hidden, scale=0.25)))
    for name, shape in [("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))]:
        found = file.tensor(f"blk.{layer}.ffn_{name}.weight", file.draw(*shape, scale=0.25), file.kinds[name])
        file.parameter(f"model.layers.{layer}.mlp.{name}_proj.weight", found)


def attention(file, layer, hidden, heads, kv, width, paired, normed, gated):
    for name, count in [("q", heads * (2 if gated else 1)), ("k", kv), ("v", kv)]:
        found = file.tensor(f"blk.{layer}.attn_{name}.weight", file.draw(count * width, hidden, scale=0.25), file.kinds[name])
        if paired and name != "v":
            # The converter's permutation, undone.
            found = found.reshape(count, width // 2, 2, hidden).swapaxes(1, 2).reshape(count * width, hidden)
        if gated and name == "q":
            found = found.reshape(heads, 2, width, hidden)
            file.parameter(f"model.layers.{layer}.attn.g_proj.weight", found[:, 1].reshape(-1, hidden))
            found = found[:, 0].reshape(-1, hidden)
        file.parameter(f"model.layers.{layer}.attn.{name}_proj.weight", found)
    found = file.tensor(f"blk.{layer}.attn_output.weight", file.draw(hidden, heads * width, scale=0.25), file.kinds["o"])
    file.parameter(f"model.layers.{layer}.attn.o_proj.weight", found)
    for name in ["q", "k"] if normed else []:
        found = file.tensor(f"blk.{layer}.attn_{name}_norm.weight", 1 + file.draw(width, scale=0.25))
        file.parameter(f"model.layers.{layer}.attn.{name}_norm.weight", found)


def reorder(numbers, axis, key_heads, sharing, width):
    """The converter's order of value heads: grouped by key head to tiled."""
    shape = numbers.shape
    split = numbers.reshape(*shape[:axis], key_heads, sharing, width, *shape[axis + 1 :])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(shape)


def linear(file, layer, hidden, key_heads, sharing, width, conv):
    heads, name, kind = key_heads * sharing, f"model.layers.{layer}.attn", file.kinds["linear"]
    keys, values = key_heads * width, heads * width
    tiled = lambda numbers, axis=0, own=width: reorder(numbers, axis, key_heads, sharing, own)
    for theirs, ours, last, scale, kind_of in [
        ("attn_qkv", "{}_proj", hidden, 0.25, kind),
        ("ssm_conv1d", "{}_conv1d", conv, 1.0, Type.F32),
    ]:
        q, k, v = (file.draw(rows, last, scale=scale) for rows in (keys, keys, values))
        file.tensor(f"blk.{layer}.{theirs}.weight", np.concatenate([q, k, tiled(v)]), kind_of)
        for part, numbers in zip("qkv", (q, k, v)):
            file.parameter(f"{name}.{ours.format(part)}.weight", numbers)
    for theirs, ours, own in [("attn_gate", "g", width), ("ssm_beta", "b", 1), ("ssm_alpha", "a", 1)]:
        numbers = file.draw(heads * own, hidden, scale=0.25)
        file.tensor(f"blk.{layer}.{theirs}.weight", tiled(numbers, 0, own), kind)
        file.parameter(f"{name}.{ours}_proj.weight", numbers)
    numbers = file.draw(hidden, values, scale=0.25)
    file.tensor(f"blk.{layer}.ssm_out.weight", tiled(numbers, 1), kind)
    file.parameter(f"{name}.o_proj.weight", numbers)
    file.parameter(f"{name}.o_norm.weight", file.tensor(f"blk.{layer}.ssm_norm.weight", 1 + file.draw(width, scale=0.25)))
    numbers = file.draw(heads)
    file.tensor(f"blk.{layer}.ssm_dt.bias", tiled(numbers, 0, 1))
    file.parameter(f"{name}.dt_bias", numbers)
    # Powers of two, whose logarithm is the nearest f32 in any library.
    numbers = np.log(np.exp2(np.arange(heads, dtype=np.float64) - 1)).astype(np.float32)
    file.tensor(f"blk.{layer}.ssm_a", tiled(-np.exp2(np.arange(heads, dtype=np.float32) - 1), 0, 1))
    file.parameter(f"{name}.A_log", numbers)


def types(path, plain):
    file = File(path, "llama", plain, 1)
    file.kinds = dict(embd=Type.Q4_K, q=Type.Q8_0, k=Type.Q5_K, v=Type.Q6_K, o=Type.Q4_0)
    file.kinds |= dict(gate=Type.Q4_1, up=Type.Q5_0, down=Type.Q5_1)
    common(file, vocab=64, hidden=256, inner=32, layers=1, heads=2, kv=1, width=16)
    file.writer.add_rope_dimension_count(16)
    file.writer.add_vocab_size(64)
    feed_forward(file, 0, 256, 32, "ffn_norm")
    attention(file, 0, 256, 2, 1, 16, paired=True, normed=False, gated=False)
    return file, tokenizer(file, "llama-bpe", 64)


def pieces(path, plain):
    file = File(path, "llama", plain, 4)
    file.kinds = dict.fromkeys(["q", "k", "v", "o", "gate", "up", "down", "embd"], Type.BF16)
    common(file, vocab=320, hidden=8, inner=8, layers=1, heads=2, kv=2, width=4)
    feed_forward(file, 0, 8, 8, "ffn_norm")
    attention(file, 0, 8, 2, 2, 4, paired=True, normed=False, gated=False)
    return file, sentence_pieces(file, 320)


def qwen3(path, plain):
    file = File(path, "qwen3", plain, 2)
    file.kinds = dict.fromkeys(["q", "k", "v", "o", "gate", "up", "down"], Type.F16) | dict(embd=Type.F16)
    common(file, vocab=64, hidden=16, inner=24, layers=1, heads=2, kv=1, width=16)
    feed_forward(file, 0, 16, 24, "ffn_norm")
    attention(file, 0, 16, 2, 1, 16, paired=False, normed=True, gated=False)
    file.parameter("lm_head.weight", file.tensor("output.weight", file.draw(64, 16), Type.BF16))
    return file, tokenizer(file, "qwen2", 64)


def qwen35(path, plain):
    file = File(path, "qwen35", plain, 3)
    file.kinds = dict.fromkeys(["q", "k", "v", "o", "gate", "up", "down", "linear"], Type.BF16) | dict(embd=Type.Q4_0)
    # The last layer predicts tokens further ahead and is left out.
    common(file, vocab=288, hidden=32, inner=16, layers=3, heads=2, kv=1, width=8)
    writer = file.writer
    writer.add_rope_dimension_count(4)
    writer.add_rope_dimension_sections([1, 1, 0, 0])
    writer.add_full_attention_interval(2)
    writer.add_nextn_predict_layers(1)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(8)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(4)
    writer.add_ssm_inner_size(32)
    feed_forward(file, 0, 32, 16, "post_attention_norm")
    linear(file, 0, 32, 2, 2, 8, 4)
    feed_forward(file, 1, 32, 16, "post_attention_norm")
    attention(file, 1, 32, 2, 1, 8, paired=False, normed=True, gated=True)
    own = dict(file.expected)
    if plain:  # llama.cpp wants all of the layer
        feed_forward(file, 2, 32, 16, "post_attention_norm")
        attention(file, 2, 32, 2, 1, 8, paired=False, normed=True, gated=True)
        file.tensor("blk.2.nextn.eh_proj.weight", file.draw(32, 64))
    for name in ["enorm", "hnorm", "shared_head_norm"]:
        file.tensor(f"blk.2.nextn.{name}.weight", file.draw(32))
    file.expected = own
    return file, tokenizer(file, "qwen35", 288)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true", help="all tensors in f32")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for make in (types, pieces, qwen3, qwen35):
        path = arguments.folder / f"{make.__name__}.gguf"
        file, own = make(path, arguments.plain)
        file.close()
        texts = {text: own.encode(text, add_special_tokens=False).ids for text in TEXTS}
        expected[path.name] = {"parameters": file.expected, "ids": texts}
        if not arguments.plain and path.name == "qwen3.gguf":
            sum = hashlib.sha256(path.read_bytes()).hexdigest()
            path.with_name("qwen3.gguf.sha256").write_text(f"{sum}  {path.name}\n", encoding="utf-8")
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (arguments.folder / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
