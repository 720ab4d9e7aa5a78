"""The files of models_peers.py, which are made once: copies of a GGUF file in other formats, and a random model of
Qwen3.5's shape (0.8B) as a folder for transformers and as GGUF."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType, quants

HIDDEN, INNER, VOCABULARY, LAYERS, EVERY = 1024, 3584, 248_320, 24, 4
HEADS, KV_HEADS, WIDTH = 8, 2, 256  # of attention, in every fourth layer
LINEAR_HEADS, LINEAR_WIDTH, CONVOLUTION = 16, 128, 4  # of Gated DeltaNet, in the others


def finish(writer, part, target):
    """Writes a file under another name first, so that what has its name is whole."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


def copied(source, kind):
    """The file `NAME.FORMAT.gguf` with its matrices in another format, beside it."""
    target = source.with_name(f"{source.name.rsplit('.', 2)[0]}.{kind.upper()}.gguf")
    if target.exists():
        return target
    reader, part = GGUFReader(source), target.with_suffix(".part")
    writer = GGUFWriter(part, reader.fields["general.architecture"].contents(), use_temp_file=True)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    wanted = GGMLQuantizationType[kind.upper()]
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        numbers = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quants.quantize(numbers, wanted), raw_dtype=wanted)
    return finish(writer, part, target)


def tensors():
    """Names in the folder and in GGUF, and shapes, in the order of the layers."""
    yield "embed_tokens.weight", "token_embd.weight", (VOCABULARY, HIDDEN)
    key, value = LINEAR_HEADS * LINEAR_WIDTH, LINEAR_HEADS * LINEAR_WIDTH
    for layer in range(LAYERS):
        yield from (
            (f"layers.{layer}.{theirs}", f"blk.{layer}.{ours}", shape)
            for theirs, ours, shape in [
                ("input_layernorm.weight", "attn_norm.weight", (HIDDEN,)),
                ("post_attention_layernorm.weight", "post_attention_norm.weight", (HIDDEN,)),
                ("mlp.gate_proj.weight", "ffn_gate.weight", (INNER, HIDDEN)),
                ("mlp.up_proj.weight", "ffn_up.weight", (INNER, HIDDEN)),
                ("mlp.down_proj.weight", "ffn_down.weight", (HIDDEN, INNER)),
                *(
                    [
                        # For each head its query and its gate.
                        ("self_attn.q_proj.weight", "attn_q.weight", (2 * HEADS * WIDTH, HIDDEN)),
                        ("self_attn.k_proj.weight", "attn_k.weight", (KV_HEADS * WIDTH, HIDDEN)),
                        ("self_attn.v_proj.weight", "attn_v.weight", (KV_HEADS * WIDTH, HIDDEN)),
                        ("self_attn.o_proj.weight", "attn_output.weight", (HIDDEN, HEADS * WIDTH)),
                        ("self_attn.q_norm.weight", "attn_q_norm.weight", (WIDTH,)),
                        ("self_attn.k_norm.weight", "attn_k_norm.weight", (WIDTH,)),
                    ]
                    if layer % EVERY == EVERY - 1
                    # As many value heads as key heads, so that both files have them in the same order.
                    else [
                        ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", (2 * key + value, HIDDEN)),
                        ("linear_attn.in_proj_z.weight", "attn_gate.weight", (value, HIDDEN)),
                        ("linear_attn.in_proj_b.weight", "ssm_beta.weight", (LINEAR_HEADS, HIDDEN)),
                        ("linear_attn.in_proj_a.weight", "ssm_alpha.weight", (LINEAR_HEADS, HIDDEN)),
                        ("linear_attn.conv1d.weight", "ssm_conv1d.weight", (2 * key + value, 1, CONVOLUTION)),
                        ("linear_attn.out_proj.weight", "ssm_out.weight", (HIDDEN, value)),
                        ("linear_attn.norm.weight", "ssm_norm.weight", (LINEAR_WIDTH,)),
                        ("linear_attn.dt_bias", "ssm_dt.bias", (LINEAR_HEADS,)),
                        ("linear_attn.A_log", "ssm_a", (LINEAR_HEADS,)),
                    ]
                ),
            ]
        )
    yield "norm.weight", "output_norm.weight", (HIDDEN,)


def drawn(name, shape, random):
    """Numbers that bf16 holds, as a fresh model has them."""
    kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
    if kind == "A_log":
        numbers = np.log(random.uniform(1, 16, shape))
    elif kind == "dt_bias" or name.endswith("linear_attn.norm.weight"):
        numbers = np.ones(shape)
    elif len(shape) == 1:  # norms, which are stored without their one
        numbers = np.zeros(shape)
    else:
        numbers = random.standard_normal(shape, dtype=np.float32) * (0.2 if kind == "conv1d" else 0.02)
    raw = quants.quantize(numbers.astype(np.float32), GGMLQuantizationType.BF16)
    return raw, quants.dequantize(raw, GGMLQuantizationType.BF16).reshape(shape)


def of_gguf(name, numbers):
    """The numbers in f32 as a GGUF file has them, for tensors that are not matrices."""
    if name.endswith("A_log"):
        return -np.exp(numbers)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return numbers + 1
    return numbers.squeeze()


def vocabulary():
    """A tokenizer with an id for each byte, spelled as byte-level BPE does, one merge and unused ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    spelled = [*map(chr, plain), *(chr(256 + i) for i, _ in enumerate(others))]
    names = [*spelled, "th", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return names + [f"[PAD{i}]" for i in range(len(names), VOCABULARY)]


def describe(writer, names):
    """The metadata of the GGUF file."""
    writer.add_name("random Qwen3.5 0.8B")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(EVERY)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_state_size(LINEAR_WIDTH)
    writer.add_ssm_group_count(LINEAR_HEADS)
    writer.add_ssm_time_step_rank(LINEAR_HEADS)
    writer.add_ssm_inner_size(LINEAR_HEADS * LINEAR_WIDTH)
    others = {"<|": TokenType.CONTROL, "[P": TokenType.UNUSED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(names)
    writer.add_token_types([others.get(name[:2], TokenType.NORMAL) for name in names])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(names.index("<|im_end|>"))
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def folder_files(folder, names):
    """The configuration and the tokenizer of the folder."""
    kinds = ["full_attention" if i % EVERY == EVERY - 1 else "linear_attention" for i in range(LAYERS)]
    end = names.index("<|im_end|>")
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "hidden_act": "silu",
        "layer_types": kinds, "full_attention_interval": EVERY, "linear_conv_kernel_dim": CONVOLUTION,
        "linear_num_key_heads": LINEAR_HEADS, "linear_num_value_heads": LINEAR_HEADS,
        "linear_key_head_dim": LINEAR_WIDTH, "linear_value_head_dim": LINEAR_WIDTH, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768, "tie_word_embeddings": True, "eos_token_id": end, "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    off = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    added = [{"id": i, "content": names[i], "special": True, **off} for i in (end - 2, end - 1, end)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": ["t h"]}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["chat_template"] = "{{ messages[0].content }}"
    for name, value in [("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)]:
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def write_safetensors(path, stored):
    """A file of tensors in bf16."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, raw) in stored.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + raw.nbytes]}
        at += raw.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, raw in stored.values():
            file.write(raw.tobytes())


def random_qwen(work: Path):
    """The folder with random weights, and in it the GGUF file of the same weights in bf16."""
    folder = work / "qwen"
    target = folder / "Qwen3.5-0.8B-random.BF16.gguf"
    if target.exists():
        return folder, target
    folder.mkdir(parents=True, exist_ok=True)
    names, random, part, stored = vocabulary(), np.random.default_rng(0), target.with_suffix(".part"), {}
    writer = GGUFWriter(part, "qwen35")
    describe(writer, names)
    for name, ours, shape in tensors():
        raw, numbers = drawn(name, shape, random)
        stored[f"model.{name}"] = shape, raw
        if len(shape) == 2:
            writer.add_tensor(ours, raw, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(ours, of_gguf(name, numbers).astype(np.float32))
    write_safetensors(folder / "model.safetensors", stored)
    folder_files(folder, names)
    return folder, finish(writer, part, target)
