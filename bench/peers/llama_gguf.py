"""Writes a small random Llama on bytes as a GGUF file, for `bench/serve.py --llama`.

    python bench/peers/llama_gguf.py OUTPUT.gguf

About as many parameters as tiny/march: 6 layers of width 192, and a vocabulary of 256 bytes and three special tokens.
It writes only letters, so that no answer ends early or waits for the rest of a character. Needs the packages `gguf` and
`numpy`.
"""

import sys

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, HIDDEN, CONTEXT = 192, 6, 3, 512, 131_072
SPECIAL = ["<unk>", "<s>", "</s>"]


def main():
    writer = gguf.GGUFWriter(sys.argv[1], "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    # Text has no pieces but bytes, so every byte is a token.
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)

    random = np.random.default_rng(0)
    matrix = lambda rows, columns: random.normal(0, 0.02, (rows, columns)).astype(np.float32)
    output = matrix(len(tokens), WIDTH)
    # Only letters are written: the logits of all others are 0, and one of the letters is above.
    letters = np.arange(len(SPECIAL) + ord("a"), len(SPECIAL) + ord("z") + 1)
    output[np.setdiff1d(np.arange(len(tokens)), letters)] = 0
    writer.add_tensor("token_embd.weight", matrix(len(tokens), WIDTH))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output.weight", output)
    for layer in range(LAYERS):
        for name, rows, columns in [
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH, WIDTH),
            ("attn_v", WIDTH, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", HIDDEN, WIDTH),
            ("ffn_up", HIDDEN, WIDTH),
            ("ffn_down", WIDTH, HIDDEN),
        ]:
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, columns))
        for name in "attn_norm", "ffn_norm":
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
