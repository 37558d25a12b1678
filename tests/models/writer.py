"""Writes tiny random models: about a megabyte, well under a second each, the same bytes every time.

The weights are uniform random numbers, scaled so that logits have a standard deviation of about 3 and
greedy text does not fall into one repeated token. Dimension 0 of the hidden state is kept for one purpose:
every embedding holds the constant `_ANCHOR` there and the weights that read or write it inside a layer are
0, so column 0 of the output matrix acts as a bias for each token. That is how a model never (or sometimes)
produces a control token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from gguf import GGUFWriter, LlamaFileType, RopeScalingType

from tests.models import templates
from tests.models.vocabulary import BOS, EOS, FIRST_TEXT, IM_END, N_TOKENS, NEWLINE, SPACE, UNK, vocabulary

N_EMBD = 128
HEAD_SIZE = 64  # rows of quantised KV need a multiple of 32, rotated KV a multiple of 64
N_CTX_TRAIN = 8192
WINDOW = 32  # of MS
LORA_RANK = 4

_ANCHOR = 4.0
_LOGIT_STD = 3.0
_WORD_LOGIT = 1.5  # added to the logits of tokens that start a word, so that text has spaces
_NEVER = -20.0  # added to the logits of tokens that greedy and sampled text should not contain

Array = np.ndarray
Tensors = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What one tiny model is: architecture and random seed, and what its file says about text."""

    arch: str = "llama"
    name: str = "tiny llama"
    seed: int = 1
    n_ctx_train: int = N_CTX_TRAIN
    template: str | None = templates.CHATML
    vocab: bool = True
    add_bos: bool = False
    space_prefix: bool = False
    end_logit: float = _NEVER  # added to the logit of <|im_end|>
    n_ctx_original: int = 0  # of two sets of rope factors, the long ones apply in contexts beyond it; 0: there are none


_M = Spec()
SPECS: dict[str, Spec] = {
    "M": _M,
    "M2": replace(_M, seed=2),
    "ME": replace(_M, name="tiny llama that ends", end_logit=2.5),
    "MS": Spec(arch="gemma3", name="tiny gemma3", seed=3),
    "MR": Spec(arch="mamba", name="tiny mamba", seed=4),
    "MH": Spec(arch="granitehybrid", name="tiny granite hybrid", seed=5),
    "MH2": Spec(arch="lfm2", name="tiny lfm2", seed=6),
    "ML": Spec(arch="deepseek2", name="tiny deepseek2", seed=7),
    "MG": Spec(arch="gemma4", name="tiny gemma4", seed=8),
    "no_template": replace(_M, template=None),
    "no_vocab": replace(_M, template=None, vocab=False),
    "bos_template": replace(_M, template=templates.BOS, add_bos=True),
    "strict_template": replace(_M, template=templates.STRICT),
    "think_template": replace(_M, template=templates.THINK),
    "space_prefix": replace(_M, space_prefix=True),
    "short_ctx": replace(_M, n_ctx_train=256),
    "long_rope": replace(_M, name="tiny llama with two sets of rope factors", n_ctx_original=1024),
}
NAMES = tuple(SPECS)


def write(name: str, path: Path) -> Path:
    """Write the model called `name` (one of `NAMES`) to `path` and return the path."""
    return write_spec(SPECS[name], path)


def write_spec(spec: Spec, path: Path) -> Path:
    """Write the model that `spec` describes to `path` and return the path."""
    writer = GGUFWriter(path, spec.arch)
    writer.add_type("model")
    writer.add_name(spec.name)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(N_EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    tensors = _tensors(spec, writer)
    if spec.n_ctx_original:
        _add_rope_factors(spec, writer, tensors)
    _add_tokenizer(spec, writer)
    for tensor_name, values in tensors.items():
        writer.add_tensor(tensor_name, values)
    _finish(writer)
    return path


def _add_rope_factors(spec: Spec, writer: GGUFWriter, tensors: Tensors) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(spec.n_ctx_original)
    for name, factor in (("long", 4.0), ("short", 1.0)):
        tensors[f"rope_factors_{name}.weight"] = np.full(HEAD_SIZE // 2, factor, np.float32)


def lora(path: Path, base: str = "M", seed: int = 1, scale: float = 1.0) -> Path:
    """Write a LoRA adapter for q and v of the model called `base` to `path` and return the path.

    At scale 1 its product is about as large as the weights it is added to.
    """
    spec = SPECS[base]
    writer = GGUFWriter(path, spec.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_name(f"tiny adapter {seed}")
    writer.add_float32("adapter.lora.alpha", float(LORA_RANK))
    random = _Random(seed=1000 + seed)
    for name, weight in _tensors(spec, GGUFWriter(None, spec.arch)).items():
        if name.endswith((".attn_q.weight", ".attn_v.weight")):
            n_out, n_in = weight.shape
            writer.add_tensor(f"{name}.lora_a", random(f"{name}.lora_a", (LORA_RANK, n_in), n_in**-0.5))
            writer.add_tensor(f"{name}.lora_b", random(f"{name}.lora_b", (n_out, LORA_RANK), scale * LORA_RANK**-0.5))
    _finish(writer)
    return path


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(spec: Spec, writer: GGUFWriter) -> None:
    if not spec.vocab:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(N_TOKENS)
        return
    words = vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words.pieces)
    writer.add_token_scores(words.scores)
    writer.add_token_types(words.types)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(spec.add_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(spec.space_prefix)
    if spec.template is not None:
        writer.add_chat_template(spec.template)


@dataclass(frozen=True, slots=True)
class _Random:
    """Uniform random arrays; each comes from the seed and its own name, whatever was drawn before."""

    seed: int

    def __call__(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Array:
        random = np.random.default_rng([self.seed, crc32(name.encode())])
        # a uniform draw is exact arithmetic everywhere, a normal one goes through the C library's logarithm
        unit = random.random(shape, dtype=np.float32) * 2 - 1
        return (unit * np.float32(std * 3**0.5) + np.float32(mean)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Collects the tensors of one model under their file names."""

    random: _Random
    tensors: Tensors

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0, *, into_hidden: bool = False) -> None:
        """An f16 matrix that maps unit inputs to outputs of about `gain`; `into_hidden` spares the anchor."""
        values = self.random(name, (n_out, n_in), gain * n_in**-0.5)
        if into_hidden:
            values[0] = 0
        self.tensors[f"{name}.weight"] = values.astype(np.float16)

    def norm(self, name: str, n: int = N_EMBD, gain: float = 1.0, *, anchor: float | None = None) -> None:
        values = self.random(name, (n,), 0.1 * gain, gain)
        if anchor is not None:
            values[0] = anchor
        self.tensors[f"{name}.weight"] = values

    def vector(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        """An f32 tensor; `name` is the whole name."""
        self.tensors[name] = self.random(name, shape, std, mean)


def _tensors(spec: Spec, writer: GGUFWriter) -> Tensors:
    """The tensors of a model; what its architecture needs to say about their sizes goes to `writer`."""
    weights = _Weights(_Random(spec.seed), {})
    embd_scale = N_EMBD**-0.5 if spec.arch in ("gemma3", "gemma4") else 1.0  # multiply embeddings by sqrt(n_embd)
    embd = weights.random("token_embd", (N_TOKENS, N_EMBD), 1.0)
    embd[:, 0] = _ANCHOR
    weights.tensors["token_embd.weight"] = (embd * np.float32(embd_scale)).astype(np.float16)
    weights.norm("token_embd_norm" if spec.arch == "lfm2" else "output_norm", anchor=1.0)
    hidden_rms = _ARCHITECTURES[spec.arch](weights, writer)
    weights.tensors["output.weight"] = _output(spec, weights.random, hidden_rms)
    return weights.tensors


def _output(spec: Spec, random: _Random, hidden_rms: float) -> Array:
    output = random("output", (N_TOKENS, N_EMBD), _LOGIT_STD * N_EMBD**-0.5)
    bias = np.zeros(N_TOKENS, dtype=np.float32)
    bias[:FIRST_TEXT] = _NEVER  # control tokens; and bytes, which would be broken UTF-8 more often than not
    bias[NEWLINE] = 0
    bias[IM_END] = spec.end_logit
    bias[[i for i, piece in enumerate(vocabulary().pieces) if piece.startswith(SPACE)]] = _WORD_LOGIT
    output[:, 0] = bias / np.float32(_ANCHOR / hidden_rms)
    return output.astype(np.float16)


def _attention(
    w: _Weights,
    i: int,
    n_head: int,
    n_head_kv: int,
    *,
    gain: float,
    qk_norm: bool = False,
    out_gain: float = 1.0,
    size: int | None = None,
    has_kv: bool = True,
) -> None:
    at, size = f"blk.{i}", size or HEAD_SIZE
    qk = 1.0 if qk_norm else gain
    w.matrix(f"{at}.attn_q", n_head * size, N_EMBD, qk)
    if has_kv:
        w.matrix(f"{at}.attn_k", n_head_kv * size, N_EMBD, qk)
        w.matrix(f"{at}.attn_v", n_head_kv * size, N_EMBD)
    w.matrix(f"{at}.attn_output", N_EMBD, n_head * size, out_gain, into_hidden=True)
    if qk_norm:
        w.norm(f"{at}.attn_q_norm", size, gain)
        if has_kv:
            w.norm(f"{at}.attn_k_norm", size, gain)


def _feed_forward(w: _Weights, i: int, n_ff: int, out_gain: float = 1.0) -> None:
    at = f"blk.{i}"
    w.norm(f"{at}.ffn_norm", anchor=0.0)
    w.matrix(f"{at}.ffn_gate", n_ff, N_EMBD)
    w.matrix(f"{at}.ffn_up", n_ff, N_EMBD)
    w.matrix(f"{at}.ffn_down", N_EMBD, n_ff, out_gain, into_hidden=True)


def _llama(w: _Weights, writer: GGUFWriter) -> float:
    n_layer, n_head, n_head_kv, n_ff = 2, 4, 2, 256
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    for i in range(n_layer):
        w.norm(f"blk.{i}.attn_norm", anchor=0.0)
        _attention(w, i, n_head, n_head_kv, gain=1.6, out_gain=1.6)
        _feed_forward(w, i, n_ff, 2.0)
    return 2.5


def _gemma3(w: _Weights, writer: GGUFWriter) -> float:
    n_layer, n_head, n_head_kv, n_ff = 4, 2, 1, 192
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(n_layer)  # three windowed layers, then one full layer
    for i in range(n_layer):
        w.norm(f"blk.{i}.attn_norm", anchor=0.0)
        _attention(w, i, n_head, n_head_kv, gain=1.6, qk_norm=True)
        w.norm(f"blk.{i}.post_attention_norm", anchor=0.0)
        _feed_forward(w, i, n_ff)
        w.norm(f"blk.{i}.post_ffw_norm", anchor=0.0)
    return 3.2


def _mamba(w: _Weights, writer: GGUFWriter) -> float:
    n_layer, d_inner, d_state, d_conv, dt_rank = 2, 2 * N_EMBD, 16, 4, 8
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(d_conv)
    writer.add_ssm_inner_size(d_inner)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(dt_rank)
    for i in range(n_layer):
        at = f"blk.{i}"
        w.norm(f"{at}.attn_norm", anchor=0.0)
        w.matrix(f"{at}.ssm_in", 2 * d_inner, N_EMBD)
        w.vector(f"{at}.ssm_conv1d.weight", (d_inner, d_conv), 0.7)
        w.vector(f"{at}.ssm_conv1d.bias", (d_inner,), 0.1)
        w.matrix(f"{at}.ssm_x", dt_rank + 2 * d_state, d_inner)
        w.matrix(f"{at}.ssm_dt", d_inner, dt_rank)
        w.vector(f"{at}.ssm_dt.bias", (d_inner,), 0.8, -2.0)
        w.vector(f"{at}.ssm_a", (d_inner, d_state), 0.25, -0.5)
        w.vector(f"{at}.ssm_d", (d_inner,), 0.1, 1.0)
        w.matrix(f"{at}.ssm_out", N_EMBD, d_inner, into_hidden=True)
    return 2.5


def _granite_hybrid(w: _Weights, writer: GGUFWriter) -> float:
    d_inner, d_state, d_conv, n_ssm_head, n_group = 2 * N_EMBD, 16, 4, 4, 1
    n_head, n_ff = 2, 128
    n_head_kv = [0, 1, 0]  # 0 marks a recurrent layer
    writer.add_block_count(len(n_head_kv))
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_ssm_conv_kernel(d_conv)
    writer.add_ssm_inner_size(d_inner)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(n_ssm_head)
    writer.add_ssm_group_count(n_group)
    d_conv_in = d_inner + 2 * n_group * d_state
    for i, n_kv in enumerate(n_head_kv):
        at = f"blk.{i}"
        w.norm(f"{at}.attn_norm", anchor=0.0)
        if n_kv:
            _attention(w, i, n_head, n_kv, gain=1.6, out_gain=1.6)
        else:
            w.matrix(f"{at}.ssm_in", d_inner + d_conv_in + n_ssm_head, N_EMBD, 1.5)
            w.vector(f"{at}.ssm_conv1d.weight", (d_conv_in, d_conv), 0.7)
            w.vector(f"{at}.ssm_conv1d.bias", (d_conv_in,), 0.1)
            w.vector(f"{at}.ssm_dt.bias", (n_ssm_head,), 0.8, -2.0)
            w.vector(f"{at}.ssm_a", (n_ssm_head, 1), 0.25, -0.5)
            w.vector(f"{at}.ssm_d", (n_ssm_head, 1), 0.1, 1.0)
            w.tensors[f"{at}.ssm_norm.weight"] = w.random(f"{at}.ssm_norm", (n_group, d_inner // n_group), 0.1, 1.0)
            w.matrix(f"{at}.ssm_out", N_EMBD, d_inner, into_hidden=True)
        _feed_forward(w, i, n_ff, 2.0)
    return 2.5


def _lfm2(w: _Weights, writer: GGUFWriter) -> float:
    d_conv, n_ff = 3, 128
    n_head = N_EMBD // HEAD_SIZE
    n_head_kv = [0, 1, 0]  # 0 marks a short convolution
    writer.add_block_count(len(n_head_kv))
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_freq_base(1000000.0)
    writer.add_shortconv_l_cache(d_conv)
    for i, n_kv in enumerate(n_head_kv):
        at = f"blk.{i}"
        w.norm(f"{at}.attn_norm", anchor=0.0)
        if n_kv:
            _attention(w, i, n_head, n_kv, gain=1.6, qk_norm=True, out_gain=1.6)
        else:
            w.matrix(f"{at}.shortconv.in_proj", 3 * N_EMBD, N_EMBD)
            w.vector(f"{at}.shortconv.conv.weight", (N_EMBD, d_conv), 0.6)
            w.matrix(f"{at}.shortconv.out_proj", N_EMBD, N_EMBD, into_hidden=True)
        _feed_forward(w, i, n_ff, 2.0)
    return 2.5


def _deepseek2(w: _Weights, writer: GGUFWriter) -> float:
    """Latent attention: a cell holds a vector of rank `n_latent` and a rotated key, and no values."""
    n_layer, n_head, n_ff, n_latent, n_rot, n_plain, n_value = 2, 4, 256, 96, 32, 32, 32
    writer.add_block_count(n_layer)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_expert_shared_count(0)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(n_latent)
    writer.add_key_length(n_latent + n_rot)
    writer.add_value_length(n_latent)
    writer.add_key_length_mla(n_plain + n_rot)
    writer.add_value_length_mla(n_value)
    writer.add_rope_dimension_count(n_rot)
    writer.add_rope_freq_base(10000.0)
    for i in range(n_layer):
        at = f"blk.{i}"
        w.norm(f"{at}.attn_norm", anchor=0.0)
        w.matrix(f"{at}.attn_q", n_head * (n_plain + n_rot), N_EMBD, 1.6)
        w.matrix(f"{at}.attn_kv_a_mqa", n_latent + n_rot, N_EMBD, 1.6)
        w.norm(f"{at}.attn_kv_a_norm", n_latent)
        for name, n_out, n_in in (("k", n_latent, n_plain), ("v", n_value, n_latent)):
            values = w.random(f"{at}.attn_{name}_b", (n_head, n_out, n_in), 1.6 * n_in**-0.5)
            w.tensors[f"{at}.attn_{name}_b.weight"] = values.astype(np.float16)
        w.matrix(f"{at}.attn_output", N_EMBD, n_head * n_value, 1.6, into_hidden=True)
        _feed_forward(w, i, n_ff, 2.0)
    return 2.5


def _gemma4(w: _Weights, writer: GGUFWriter) -> float:
    """Layers of two shapes, the last two of which use the cells of earlier ones."""
    is_windowed = [True, True, False, True, False]
    n_shared, n_ff = 2, 128
    heads = [2 if windowed else 1 for windowed in is_windowed]
    writer.add_block_count(len(heads))
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(2 * HEAD_SIZE)
    writer.add_value_length(2 * HEAD_SIZE)
    writer.add_key_length_swa(HEAD_SIZE)
    writer.add_value_length_swa(HEAD_SIZE)
    writer.add_rope_dimension_count(2 * HEAD_SIZE)
    writer.add_rope_dimension_count_swa(HEAD_SIZE)
    writer.add_rope_freq_base(1000000.0)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_shared_kv_layers(n_shared)
    writer.add_embedding_length_per_layer_input(0)
    w.tensors["rope_freqs.weight"] = np.ones(HEAD_SIZE, np.float32)
    for i, n_head in enumerate(heads):
        w.norm(f"blk.{i}.attn_norm", anchor=0.0)
        size = HEAD_SIZE if is_windowed[i] else 2 * HEAD_SIZE
        _attention(w, i, n_head, n_head, gain=0.5, qk_norm=True, size=size, has_kv=i < len(heads) - n_shared)
        w.norm(f"blk.{i}.post_attention_norm", anchor=0.0)
        _feed_forward(w, i, n_ff)
        w.norm(f"blk.{i}.post_ffw_norm", anchor=0.0)
    return 3.2


# each adds its layers and sizes, and returns about how large the last hidden state is (root mean square)
_ARCHITECTURES: dict[str, Callable[[_Weights, GGUFWriter], float]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "deepseek2": _deepseek2,
    "gemma4": _gemma4,
}
