"""The tiny models are what the other tests take them for."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2
import llama_cpp as native
import numpy as np
import pytest

from llamakv.engine.llamacpp.native import native_log
from tests.conftest import TinyModels
from tests.models import templates, writer
from tests.models.vocabulary import BOS, EOS, FIRST_BYTE, FIRST_TEXT, IM_END, IM_START, N_TOKENS, vocabulary

PROMPT = "<|im_start|>user\nWhat is the name of the city?<|im_end|>\n<|im_start|>assistant\n"
STORY = "she opened the old book on the table and began to read the story of a king " * 8
N_BATCH = 256
DENSE = ("M", "MS", "MG", "MH", "MH2", "ML")  # have an attention cache


@pytest.fixture(autouse=True)
def _quiet_engine() -> None:
    native_log().sink = None  # a callback of our own would take the log away from the tests that come after these


class Engine:
    """One loaded model with one context."""

    def __init__(self, model: object, context: object) -> None:
        self.model = model
        self.context = context
        self.vocab = native.llama_model_get_vocab(model)

    def tokenize(self, text: str, *, special: bool = True, add_special: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        ids = (native.llama_token * room)()
        n = native.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, special)
        assert n >= 0
        return list(ids[:n])

    def text(self, ids: list[int]) -> str:
        buffer = ctypes.create_string_buffer(64)
        data = b""
        for token in ids:
            n = native.llama_token_to_piece(self.vocab, token, buffer, 64, 0, True)
            data += buffer.raw[:n]
        return data.decode()

    def decode(self, ids: list[int], start: int = 0, seq_id: int = 0) -> np.ndarray:
        """Decode and return the logits after the last token."""
        for at in range(0, len(ids), N_BATCH):
            part = ids[at : at + N_BATCH]
            batch = native.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = start + at + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = seq_id
                batch.logits[i] = i == len(part) - 1
            status = native.llama_decode(self.context, batch)
            native.llama_batch_free(batch)
            assert status == 0
        return np.ctypeslib.as_array(native.llama_get_logits_ith(self.context, -1), shape=(N_TOKENS,)).copy()

    def greedy(self, logits: np.ndarray, start: int, n: int, seq_id: int = 0) -> list[int]:
        """At most `n` tokens of greedy text, up to and with the one that ends it."""
        ids: list[int] = []
        while len(ids) < n:
            ids.append(int(logits.argmax()))
            if native.llama_vocab_is_eog(self.vocab, ids[-1]):
                break
            logits = self.decode(ids[-1:], start + len(ids) - 1, seq_id)
        return ids

    def clear(self) -> None:
        native.llama_memory_clear(native.llama_get_memory(self.context), True)


@contextmanager
def opened(
    path: Path, *, flash_attn: bool = True, kv_type: int = native.GGML_TYPE_F16, swa_full: bool = True
) -> Iterator[Engine]:
    model = native.llama_model_load_from_file(str(path).encode(), native.llama_model_default_params())
    assert model, f"{path.name} did not load"
    settings = native.llama_context_default_params()
    settings.n_ctx = 1024
    settings.n_batch = settings.n_ubatch = N_BATCH
    settings.n_seq_max = 2
    settings.kv_unified = True
    settings.swa_full = swa_full
    settings.n_threads = settings.n_threads_batch = 1
    settings.flash_attn_type = int(flash_attn)
    settings.type_k = settings.type_v = kv_type
    context = native.llama_init_from_model(model, settings)
    try:
        assert context, f"{path.name} gave no context"
        yield Engine(model, context)
    finally:
        if context:
            native.llama_free(context)
        native.llama_model_free(model)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["M", "M2", "ME", "MS", "MG", "MR", "MH", "MH2", "ML"])
def test_decodes_varied_text(models: TinyModels, name: str, flash_attn: bool) -> None:
    with opened(models(name), flash_attn=flash_attn) as engine:
        ids = engine.tokenize(PROMPT)
        logits = engine.decode(ids)
        text = logits[FIRST_TEXT:]
        assert np.isfinite(logits).all()
        assert 2.5 < text.std() < 3.6
        reply = engine.greedy(logits, len(ids), 40)
        if name == "ME":
            assert reply[-1] == IM_END
            assert len(reply) > 4
        else:
            assert len(reply) == 40
            assert len(set(reply)) > 25
            assert min(reply) >= FIRST_TEXT or reply.count(FIRST_BYTE + 10)
            assert " " in engine.text(reply)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["M", "MS", "MG", "MR", "MH", "MH2", "ML"])
def test_state_round_trip_continues_with_the_same_tokens(models: TinyModels, name: str, flash_attn: bool) -> None:
    with opened(models(name), flash_attn=flash_attn) as engine:
        *before, pending = engine.tokenize(STORY)
        engine.decode(before)
        size = native.llama_state_seq_get_size(engine.context, 0)
        state = (ctypes.c_uint8 * size)()
        assert native.llama_state_seq_get_data(engine.context, state, size, 0) == size
        cold = engine.greedy(engine.decode([pending], len(before)), len(before) + 1, 12)
        engine.clear()
        assert native.llama_state_seq_set_data(engine.context, state, size, 1) == size
        warm = engine.greedy(engine.decode([pending], len(before), 1), len(before) + 1, 12, 1)
        assert warm == cold


@pytest.mark.parametrize("name", ["M", "MS", "MG", "MR", "MH", "MH2", "ML"])
def test_logits_depend_on_early_tokens(models: TinyModels, name: str) -> None:
    """A wrong or missing state must show: token 0 still matters 60 tokens later."""
    with opened(models(name)) as engine:
        ids = engine.tokenize(STORY)[:60]
        one = engine.decode(ids)
        engine.clear()
        other = engine.decode([ids[0] + 7, *ids[1:]])
        assert np.abs(one - other).max() > 0.05


@pytest.mark.parametrize("kv_type", [native.GGML_TYPE_Q8_0, native.GGML_TYPE_Q4_0])
@pytest.mark.parametrize("name", DENSE)
def test_takes_quantised_kv(models: TinyModels, name: str, kv_type: int) -> None:
    with opened(models(name), kv_type=kv_type) as engine:
        ids = engine.tokenize(PROMPT)
        assert len(set(engine.greedy(engine.decode(ids), len(ids), 20))) > 10


def test_kinds_are_what_the_engine_says(models: TinyModels) -> None:
    kinds = {}
    for name in ("M", "MS", "MG", "MR", "MH", "MH2", "ML"):
        with opened(models(name)) as engine:
            kinds[name] = (
                native.llama_model_n_swa(engine.model),
                native.llama_model_is_recurrent(engine.model),
                native.llama_model_is_hybrid(engine.model),
                native.llama_model_n_ctx_train(engine.model),
            )
    assert kinds == {
        "M": (0, False, False, 8192),
        "MS": (writer.WINDOW, False, False, 8192),
        "MG": (writer.WINDOW, False, False, 8192),
        "MR": (0, True, False, 8192),
        "MH": (0, False, True, 8192),
        "MH2": (0, False, True, 8192),
        "ML": (0, False, False, 8192),
    }


def test_twin_differs_in_weights_only(models: TinyModels) -> None:
    one, two = models.M.read_bytes(), models.M2.read_bytes()
    assert len(one) == len(two)
    first = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    assert first > one.index(b"output.weight")
    with opened(models.M) as a, opened(models.M2) as b:
        ids = a.tokenize(PROMPT)
        assert np.abs(a.decode(ids) - b.decode(ids)).max() > 5


def test_ending_twin_differs_in_one_output_row(models: TinyModels) -> None:
    with opened(models.M) as a, opened(models.ME) as b:
        ids = a.tokenize(PROMPT)
        differs = np.flatnonzero(a.decode(ids) != b.decode(ids))
        assert differs.tolist() == [IM_END]


def test_replies_of_the_ending_model_vary_in_length(models: TinyModels) -> None:
    lengths = set()
    with opened(models.ME) as engine:
        for question in ("Hello", "Who are you?", "And then?", "Yes", "stop"):
            engine.clear()
            ids = engine.tokenize(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            lengths.add(len(engine.greedy(engine.decode(ids), len(ids), 200)))
    assert len(lengths) >= 4
    assert max(lengths) < 200


def test_same_bytes_every_time_and_small(tmp_path: Path) -> None:
    for name in writer.NAMES:
        one = writer.write(name, tmp_path / "one.gguf").read_bytes()
        assert one == writer.write(name, tmp_path / "two.gguf").read_bytes()
        assert len(one) <= 1_500_000


def test_vocabulary(models: TinyModels) -> None:
    with opened(models.M) as engine:
        vocab = engine.vocab
        assert native.llama_vocab_n_tokens(vocab) == N_TOKENS == len(vocabulary().pieces)
        assert native.llama_vocab_bos(vocab) == BOS
        assert native.llama_vocab_eos(vocab) == EOS
        assert native.llama_vocab_eot(vocab) == IM_END
        assert [t for t in range(N_TOKENS) if native.llama_vocab_is_eog(vocab, t)] == [EOS, IM_END]
        assert not native.llama_vocab_get_add_bos(vocab)
        assert engine.tokenize("<|im_start|>\n<|im_end|>") == [IM_START, FIRST_BYTE + 10, IM_END]
        assert IM_START not in engine.tokenize("<|im_start|>", special=False)
        text = "the model reads the text; naïve 漢字 😀\n\tend"
        assert engine.text(engine.tokenize(text)) == text
        assert len(engine.tokenize(STORY)) < len(STORY) / 3
        # text that was generated and then tokenised again need not give the same tokens
        assert engine.tokenize(engine.text([FIRST_BYTE + ord("t"), FIRST_BYTE + ord("h")])) != [
            FIRST_BYTE + ord("t"),
            FIRST_BYTE + ord("h"),
        ]


def test_start_token_and_space_prefix(models: TinyModels) -> None:
    with opened(models.bos_template) as engine:
        assert engine.tokenize("Hello", add_special=True)[0] == BOS
        assert engine.tokenize("<s>Hello", add_special=True)[:2] == [BOS, BOS]
    with opened(models.M) as plain, opened(models.space_prefix) as prefixed:
        assert plain.tokenize("Hello", add_special=True) == plain.tokenize("Hello")
        assert prefixed.tokenize("Hello") == plain.tokenize(" Hello")


def test_variants_without_vocabulary_template_or_context(models: TinyModels) -> None:
    with opened(models.no_vocab) as engine:
        assert native.llama_vocab_type(engine.vocab) == native.LLAMA_VOCAB_TYPE_NONE
        assert np.isfinite(engine.decode([300, 301, 302])).all()
        assert native.llama_model_chat_template(engine.model, None) is None
    with opened(models.no_template) as engine:
        assert native.llama_model_chat_template(engine.model, None) is None
    with opened(models.short_ctx) as engine:
        assert native.llama_model_n_ctx_train(engine.model) == 256
    with opened(models.strict_template) as engine:
        assert native.llama_model_chat_template(engine.model, None) == templates.STRICT.encode()


def test_adapter_changes_the_logits(models: TinyModels) -> None:
    def with_adapter(path: Path, scale: float) -> np.ndarray:
        adapter = native.llama_adapter_lora_init(engine.model, str(path).encode())
        assert adapter
        adapters = (native.llama_adapter_lora_p_ctypes * 1)(adapter)
        assert native.llama_set_adapters_lora(engine.context, adapters, 1, (ctypes.c_float * 1)(scale)) == 0
        engine.clear()
        return engine.decode(ids)

    with opened(models.M) as engine:
        ids = engine.tokenize(PROMPT)
        plain = engine.decode(ids)
        one = with_adapter(models.lora(1), 1.0)
        assert np.abs(one - plain).max() > 3
        assert np.abs(with_adapter(models.lora(2), 1.0) - one).max() > 3
        assert np.abs(with_adapter(models.lora(1), 0.5) - one).max() > 1
        np.testing.assert_array_equal(with_adapter(models.lora(1), 1.0), one)


def _render(template: str, *turns: tuple[str, str], ask: bool = True) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    messages = [{"role": role, "content": content} for role, content in turns]
    names = {"add_generation_prompt": ask, "bos_token": "<s>", "raise_exception": refuse}
    return str(jinja2.Template(template).render(messages=messages, **names))


def test_templates() -> None:
    u, a = ("user", " hi "), ("assistant", "<think>\nhm\n</think>\n\nhey")
    ask = "<|im_start|>assistant\n"
    user = "<|im_start|>user\n hi <|im_end|>\n"
    full = f"<|im_start|>assistant\n{a[1]}<|im_end|>\n"
    assert _render(templates.CHATML, u, a, u) == user + full + user + ask
    assert _render(templates.BOS, u) == "<s>" + user + ask
    assert _render(templates.THINK, u, a, ask=False) == user + full
    assert _render(templates.THINK, u, a, u) == user + "<|im_start|>assistant\nhey<|im_end|>\n" + user + ask
    assert _render(templates.STRICT, ("system", " be kind "), u) == (
        "<|im_start|>user\nbe kind\n\nhi<|im_end|>\n<|im_start|>model\n"
    )
    with pytest.raises(jinja2.TemplateError, match="alternate"):
        _render(templates.STRICT, u, u)
    with pytest.raises(jinja2.TemplateError, match="alternate"):
        _render(templates.STRICT, a)


@pytest.mark.real
def test_real_models_are_there(smollm2_path: Path, gemma_path: Path) -> None:
    for path, arch in ((smollm2_path, b"llama"), (gemma_path, b"gemma3")):
        settings = native.llama_model_default_params()
        settings.vocab_only = True
        model = native.llama_model_load_from_file(str(path).encode(), settings)
        assert model
        value = ctypes.create_string_buffer(64)
        native.llama_model_meta_val_str(model, b"general.architecture", value, 64)
        assert value.value == arch
        native.llama_model_free(model)
