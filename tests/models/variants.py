"""The small random models of this comparison: their configurations, and how each is saved."""

import copy
import sys
from dataclasses import dataclass, field

import torch

# If transformers finds flash-linear-attention, it takes its kernels, which do not run on a CPU, instead of its own code.
sys.modules["fla"] = None
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

del sys.modules["fla"]
from fla.models import (  # noqa: E402
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    TransformerConfig,
    TransformerForCausalLM,
)

CLASSES = {
    GatedDeltaNetConfig: GatedDeltaNetForCausalLM,
    LlamaConfig: LlamaForCausalLM,
    Qwen3_5Config: Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig: Qwen3_5ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3NextConfig: Qwen3NextForCausalLM,
    TransformerConfig: TransformerForCausalLM,
}

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
LAYERS = 4
LINEARLY = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass
class Variant:
    """A model. `refused` are words of the error with which march must refuse it, instead of computing its logits."""

    name: str
    config: object
    refused: tuple = ()
    edit: dict = field(default_factory=dict)  # keys of config.json that are written by hand; None removes a key
    extra: dict = field(default_factory=dict)  # shapes of tensors that are added to the file
    small: tuple = ()  # parts of names of parameters that are made a thousandth
    dtype: torch.dtype = torch.float32  # of the file
    apart: tuple = ()  # endings of names of tensors that stay in f32
    shard: str = "5GB"  # the largest size of a file
    idle: tuple = ()  # parts of names of tensors that do not count in this model


def qwen3_5(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    return Qwen3_5TextConfig(**{**common, **LINEARLY, **HEADS, **keys})


def seeing(inner=False, **keys):
    """A model that also sees; `inner` is what the configuration of its language model says about tied embeddings."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 48, "num_position_embeddings": 16}
    text = qwen3_5(tie_word_embeddings=inner).to_dict()
    ids = {"image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 99, "vision_end_token_id": 100}
    return Qwen3_5Config(text_config=text, vision_config=vision, **{**ids, **keys})


def qwen3_next(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    common |= {"num_experts": 0}
    return Qwen3NextConfig(**{**common, **LINEARLY, **HEADS, **keys})


def experts(**keys):
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return qwen3_next(**{**few, "shared_expert_intermediate_size": 24, **keys})


def llama(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaConfig(**{**common, **keys})


def qwen3(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    return Qwen3Config(**{**common, **HEADS, **keys})


def deltanet(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    return GatedDeltaNetConfig(**{**common, "num_heads": 2, "head_dim": 12, "expand_v": 1.5, **keys})


def hybrid(attn, **keys):
    return deltanet(attn=attn, **keys)


def transformer(**keys):
    common = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    return TransformerConfig(**{**common, "num_heads": 4, **keys})


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 10_000.0, **more}


# Numbers with which short texts are within reach of the scaling.
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
# A head that predicts several tokens; it is left out.
MTP = {"mtp.fc.weight": (48, 96), "mtp.norm.weight": (48,), "mtp.layers.0.mlp.up_proj.weight": (80, 48)}


def variants():
    """All models, in the order of the report."""
    every_second = {"layers": [1, 3], "num_heads": 4}
    wide = {"linear_num_value_heads": 4}
    return [
        Variant("qwen3_5", qwen3_5()),
        Variant("qwen3_5 with 4 value heads for 2 keys", qwen3_5(**wide)),
        Variant("qwen3_5 with 6 value heads for 2 keys", qwen3_5(linear_num_value_heads=6)),
        Variant("qwen3_5 tied", qwen3_5(tie_word_embeddings=True)),
        Variant("qwen3_5 attention first", qwen3_5(layer_types=[FULL, LINEAR, LINEAR, FULL])),
        Variant(
            "qwen3_5 full_attention_interval 3",
            qwen3_5(num_hidden_layers=6, full_attention_interval=3),
            edit={"layer_types": None, "full_attention_interval": 3},
        ),
        Variant("qwen3_5 no layer_types", qwen3_5(num_hidden_layers=5), edit={"layer_types": None}),
        Variant("qwen3_5 attention_bias", qwen3_5(attention_bias=True)),
        Variant("qwen3_5 partial_rotary_factor 0.5", qwen3_5(partial_rotary_factor=0.5)),
        Variant("qwen3_5 partial_rotary_factor 1", qwen3_5(partial_rotary_factor=1.0)),
        Variant("qwen3_5 rope_theta 500", qwen3_5(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        Variant("qwen3_5 rope linear", qwen3_5(rope_parameters=rope("linear", factor=4.0, partial_rotary_factor=0.5))),
        Variant("qwen3_5 rope llama3", qwen3_5(rope_parameters=LLAMA3 | {"partial_rotary_factor": 0.5})),
        Variant("qwen3_5 wider values", qwen3_5(linear_value_head_dim=12, **wide)),
        Variant("qwen3_5 narrower values", qwen3_5(linear_key_head_dim=12, linear_value_head_dim=7)),
        Variant("qwen3_5 conv kernel 3", qwen3_5(linear_conv_kernel_dim=3)),
        Variant("qwen3_5 conv kernel 2", qwen3_5(linear_conv_kernel_dim=2)),
        Variant("qwen3_5 all linear", qwen3_5(layer_types=[LINEAR] * LAYERS)),
        Variant("qwen3_5 all attention", qwen3_5(layer_types=[FULL] * LAYERS)),
        Variant("qwen3_5 rms_norm_eps 0.01", qwen3_5(rms_norm_eps=0.01)),
        Variant("qwen3_5 small queries, keys and values", qwen3_5(), small=("conv1d",)),
        Variant("qwen3_5 with mtp tensors", qwen3_5(), extra=MTP),
        Variant("qwen3_5 with an unknown tensor", qwen3_5(), refused=("extra.weight",), extra={"extra.weight": (4,)}),
        Variant("qwen3_5 hidden_act", qwen3_5(hidden_act="gelu"), refused=("hidden_act", "gelu")),
        Variant("qwen3_5 output_gate_type", qwen3_5(), edit={"attn_output_gate": True, "output_gate_type": "swish"}),
        Variant(
            "qwen3_5 output_gate_type sigmoid",
            qwen3_5(),
            refused=("output_gate_type",),
            edit={"output_gate_type": "sigmoid"},
        ),
        Variant("qwen3_5 seeing", seeing()),
        Variant("qwen3_5 seeing, tied", seeing(inner=True, tie_word_embeddings=True)),
        Variant("qwen3_5 seeing, with mtp tensors", seeing(), extra=MTP),
        Variant("qwen3_next", qwen3_next()),
        Variant("qwen3_next with 4 value heads for 2 keys", qwen3_next(**wide)),
        Variant("qwen3_next wider values", qwen3_next(linear_value_head_dim=12, linear_num_value_heads=6)),
        Variant("qwen3_next attention_bias", qwen3_next(attention_bias=True, **wide)),
        Variant("qwen3_next tied, with mtp tensors", qwen3_next(tie_word_embeddings=True), extra=MTP),
        Variant("qwen3_next full_attention_interval 2", qwen3_next(full_attention_interval=2)),
        Variant("qwen3_next rms_norm_eps 0.01", qwen3_next(rms_norm_eps=0.01)),
        Variant("qwen3_next experts unused, mlp_only_layers", experts(mlp_only_layers=[0, 1, 2, 3])),
        Variant("qwen3_next experts unused, decoder_sparse_step", experts(decoder_sparse_step=LAYERS + 1)),
        Variant("qwen3_next experts", experts(), refused=("num_experts",)),
        Variant("qwen3_next experts in a layer", experts(decoder_sparse_step=LAYERS), refused=("num_experts",)),
        Variant("llama", llama()),
        Variant("llama all heads", llama(num_key_value_heads=4)),
        Variant("llama attention_bias", llama(attention_bias=True)),
        Variant("llama head_dim", llama(head_dim=20)),
        Variant("llama tied", llama(tie_word_embeddings=True)),
        Variant("llama rope_theta", llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
        Variant("llama rope linear", llama(rope_parameters=rope("linear", factor=4.0))),
        Variant("llama rope llama3", llama(rope_parameters=LLAMA3)),
        Variant(
            "llama rope in the older form",
            llama(rope_parameters=rope("linear", factor=4.0) | {"rope_theta": 500.0}),
            edit={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        Variant(
            "llama rope_theta in the older form",
            llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            edit={"rope_parameters": None, "rope_theta": 500.0},
        ),
        Variant(
            "llama with keys of SmolLM2",
            llama(),
            edit={"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        ),
        Variant(
            "llama partial_rotary_factor",
            llama(),
            refused=("partial_rotary_factor",),
            edit={"partial_rotary_factor": 0.5},
        ),
        Variant(
            "llama rope in both forms",
            llama(rope_parameters=rope("linear", factor=4.0)),
            refused=("rope_scaling",),
            edit={"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        Variant("llama rope yarn", llama(rope_parameters=rope("yarn", factor=4.0)), refused=("rope_type", "yarn")),
        Variant(
            "llama rope dynamic",
            llama(rope_parameters=rope("dynamic", factor=4.0)),
            refused=("rope_type", "dynamic"),
        ),
        Variant("llama mlp_bias", llama(mlp_bias=True), refused=("mlp_bias",)),
        Variant("llama rms_norm_eps 0.01", llama(rms_norm_eps=0.01)),
        Variant("qwen3", qwen3()),
        Variant("qwen3 attention_bias, tied", qwen3(attention_bias=True, tie_word_embeddings=True)),
        Variant("qwen3 rms_norm_eps 0.01", qwen3(rms_norm_eps=0.01)),
        Variant("qwen3 rope llama3", qwen3(rope_parameters=LLAMA3)),
        Variant("qwen3 window 16", qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=0)),
        Variant(
            "qwen3 window 16, no layer_types",
            qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=0),
            edit={"layer_types": None},
        ),
        Variant(
            "qwen3 window 1",
            qwen3(use_sliding_window=True, sliding_window=1, max_window_layers=0),
            idle=("q_proj", "k_proj", "q_norm", "k_norm"),  # a token sees itself alone, whatever they are
        ),
        Variant(
            "qwen3 window null",
            qwen3(use_sliding_window=True, sliding_window=None, max_window_layers=0),
            edit={"layer_types": None},
        ),
        Variant(
            "qwen3 window in layer_types only",
            qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=0),
            refused=("use_sliding_window",),
            edit={"use_sliding_window": False},
        ),
        Variant("qwen3 window not used", qwen3(use_sliding_window=False, sliding_window=16, max_window_layers=0)),
        Variant(
            "qwen3 mixed windows",
            qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=2),
            refused=("layer_types",),
        ),
        Variant(
            "qwen3 mixed windows, no layer_types",
            qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=2),
            refused=("max_window_layers",),
            edit={"layer_types": None},
        ),
        Variant("fla gated_deltanet", deltanet()),
        Variant("fla gated_deltanet num_v_heads", deltanet(num_v_heads=4)),
        Variant("fla gated_deltanet expand_v 2, tied", deltanet(expand_v=2.0, tie_word_embeddings=True)),
        Variant("fla gated_deltanet use_gate false", deltanet(use_gate=False)),
        Variant("fla gated_deltanet use_short_conv false", deltanet(use_short_conv=False)),
        Variant("fla gated_deltanet sigmoid gate", deltanet(output_gate_activation="sigmoid")),
        Variant("fla gated_deltanet allow_neg_eigval", deltanet(allow_neg_eigval=True)),
        Variant("fla gated_deltanet conv_size 3", deltanet(conv_size=3)),
        Variant("fla gated_deltanet norm_eps 0.01", deltanet(norm_eps=0.01)),
        Variant("fla gated_deltanet small queries and keys", deltanet(), small=("q_conv1d", "k_conv1d")),
        Variant("fla gated_deltanet hidden_ratio", deltanet(intermediate_size=None, hidden_ratio=3)),
        Variant(
            "fla gated_deltanet all at once",
            deltanet(num_v_heads=4, use_gate=False, use_short_conv=False, allow_neg_eigval=True),
        ),
        Variant("fla gated_deltanet attnres", deltanet(attnres_block_size=2), refused=("attnres_block_size",)),
        Variant("fla gated_deltanet powlu", deltanet(hidden_act="powlu"), refused=("hidden_act", "powlu")),
        Variant("fla hybrid", hybrid(every_second)),
        Variant("fla hybrid num_kv_heads", hybrid(every_second | {"num_kv_heads": 2})),
        Variant("fla hybrid qkv_bias", hybrid(every_second | {"qkv_bias": True})),
        Variant("fla hybrid window 16", hybrid(every_second | {"window_size": 16})),
        Variant("fla hybrid rope_theta", hybrid(every_second | {"rope_theta": 500.0})),
        Variant("fla hybrid of two lists", hybrid([every_second | {"layers": [1]}, every_second | {"layers": [3]}])),
        Variant(
            "fla hybrid all at once",
            hybrid(
                every_second | {"num_kv_heads": 1, "qkv_bias": True, "window_size": 24, "rope_theta": 500.0},
                num_v_heads=4,
                allow_neg_eigval=True,
                output_gate_activation="sigmoid",
            ),
        ),
        Variant("fla hybrid without layers", hybrid(every_second | {"layers": []})),
        Variant("fla hybrid only attention", hybrid(every_second | {"layers": [0, 1, 2, 3]})),
        Variant(
            "fla hybrid of two kinds",
            hybrid([every_second | {"layers": [1]}, {"layers": [3], "num_heads": 2}]),
            refused=("attn",),
        ),
        Variant("fla transformer", transformer()),
        Variant("fla transformer num_kv_heads", transformer(num_kv_heads=2)),
        Variant("fla transformer qk_norm", transformer(qk_norm=True)),
        Variant("fla transformer qk_norm, norm_eps 0.01", transformer(qk_norm=True, norm_eps=0.01)),
        Variant("fla transformer qkv_bias", transformer(qkv_bias=True)),
        Variant("fla transformer window 16", transformer(window_size=16)),
        Variant("fla transformer window longer than the text", transformer(window_size=1000)),
        Variant("fla transformer rope_theta, tied", transformer(rope_theta=500.0, tie_word_embeddings=True)),
        Variant(
            "fla transformer all at once",
            transformer(num_kv_heads=1, qk_norm=True, qkv_bias=True, window_size=24, rope_theta=500.0),
        ),
        Variant("stored in shards", qwen3_5(**wide), shard="60KB"),
        Variant("stored in shards, qwen3_next", qwen3_next(**wide), shard="60KB"),
        Variant("stored in bf16", qwen3_5(**wide), dtype=torch.bfloat16),
        Variant("stored in bf16, qwen3_next", qwen3_next(**wide), dtype=torch.bfloat16),
        Variant("stored in bf16 and f32", qwen3_5(**wide), dtype=torch.bfloat16, apart=("A_log", "linear_attn.norm.weight")),
        Variant("stored in bf16, fla hybrid", hybrid(every_second), dtype=torch.bfloat16),
        Variant("stored in bf16, llama", llama(tie_word_embeddings=True), dtype=torch.bfloat16),
        Variant("stored in f16", qwen3_5(), dtype=torch.float16),
    ]


def changed():
    """Models whose keys are changed one by one: one of each architecture, with values that are not the defaults."""
    some = {"linear_num_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-3}
    llama3 = LLAMA3 | {"rope_theta": 500.0}
    attn = {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 16, "rope_theta": 500.0}
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    return [
        Variant("changed qwen3_5", qwen3_5(**some)),
        Variant("changed qwen3_5 seeing", seeing()),
        Variant("changed qwen3_next", qwen3_next(**some)),
        Variant("changed llama", llama(attention_bias=True, rope_parameters=llama3, rms_norm_eps=1e-3)),
        Variant("changed qwen3", qwen3(rms_norm_eps=1e-3, **windows)),
        Variant("changed fla gated_deltanet", deltanet(num_v_heads=4, allow_neg_eigval=True, norm_eps=1e-3)),
        Variant("changed fla hybrid", hybrid(attn, use_gate=False, use_short_conv=False)),
        Variant("changed fla transformer", transformer(num_kv_heads=2, qk_norm=True, qkv_bias=True, window_size=16)),
    ]


def build(variant):
    """The model with random weights, none of which is 0 or 1 by default: norms and biases count, too."""
    model = CLASSES[type(variant.config)](copy.deepcopy(variant.config)).eval()
    for name, parameter in model.named_parameters():
        own = name.rsplit(".", 2)[-1] if "." in name else name
        with torch.no_grad():
            if own == "A_log":
                parameter.uniform_(-1.5, 1.0)
            elif own == "dt_bias":
                parameter.normal_(-1.0, 1.0)
            elif parameter.ndim == 1 and own == "weight":
                # About its default, which is 0 where 1 is added to it, else 1.
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif own == "bias":
                parameter.normal_(0.0, 0.5)
            elif "embed" in name:
                parameter.normal_()
            elif "conv1d" in name:
                parameter.normal_(0.0, 0.6)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            if any(part in name for part in variant.small):
                parameter.mul_(1e-3)
    return model
