"""What a model file says, what is refused before it is loaded, and choosing tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.sampler import seed_at
from llamakv.errors import ModelFileError, NoRoomError, UsageError
from llamakv.records import MemoryKind, Sampling


@pytest.mark.parametrize(
    ("name", "kind", "window"),
    [("M", MemoryKind.DENSE, 0), ("MS", MemoryKind.WINDOWED, 32), ("MR", MemoryKind.RECURRENT, 0),
     ("MH", MemoryKind.HYBRID, 0), ("MH2", MemoryKind.HYBRID, 0), ("ML", MemoryKind.DENSE, 0),
     ("MG", MemoryKind.WINDOWED, 32)],
)  # fmt: skip
def test_memory_kinds_are_told_apart(models, name: str, kind: MemoryKind, window: int) -> None:
    with LlamaModel(models(name)) as model:
        assert (model.info.kind, model.info.n_window) == (kind, window)


def test_files_that_are_no_models_are_refused_with_their_name(models, tmp_path: Path) -> None:
    text, empty, cut = tmp_path / "a.txt", tmp_path / "empty.gguf", tmp_path / "cut.gguf"
    text.write_text("hello")
    empty.write_bytes(b"")
    cut.write_bytes(models("M").read_bytes()[:5000])
    for path in (text, empty, cut, models("no_vocab"), models.lora(1), tmp_path / "missing.gguf"):
        with pytest.raises(ModelFileError) as refused:
            LlamaModel(path)
        assert path.name in refused.value.message
        assert "\n" not in refused.value.message


def test_an_adapter_of_another_model_is_refused(models) -> None:
    with pytest.raises(ModelFileError, match="LoRA adapter"):
        LlamaModel(models("MR"), adapters=[(models.lora(1), 1.0)])


def test_settings_the_engine_cannot_do_are_refused(models) -> None:
    with LlamaModel(models("M")) as model:
        for memory, named in (
            (MemoryRequest(type_k="q3_k"), "cache type 'q3_k'"),
            (MemoryRequest(type_v="q8_0", flash_attn=False), "flash attention"),
        ):
            with pytest.raises(UsageError, match=named):
                model.open_sequence(memory, n_ctx_min=64, n_ctx_max=512, n_threads=1)
        with pytest.raises(NoRoomError):
            model.open_sequence(MemoryRequest(), n_ctx_min=600, n_ctx_max=512, n_threads=1)


def test_the_tokenizer_digest_tells_vocabularies_apart(models) -> None:
    digests = {}
    for name in ("M", "M2", "bos_template"):
        with LlamaModel(models(name)) as model:
            digests[name] = model.tokenizer_digest()
    assert digests["M"] == digests["M2"] != digests["bos_template"]


def test_text_goes_to_tokens_and_back(models) -> None:
    with LlamaModel(models("M")) as model:
        for text in ("plain words", "naïve café — 日本語 😀", "[bold]\x1b[31m", ""):
            tokens = model.tokenize(text, add_special=False, parse_special=False)
            assert b"".join(model.token_bytes(token) for token in tokens).decode() == text
        assert model.tokenize("<|im_end|>", add_special=False, parse_special=True) == [4]
        assert (model.token_bytes(4), model.token_bytes(4, special=True)) == (b"", b"<|im_end|>")
        assert model.is_end(4)


def write(model: LlamaModel, sampling: Sampling, n: int = 20) -> list[int]:
    sequence = model.open_sequence(MemoryRequest(), n_ctx_min=64, n_ctx_max=512, n_threads=1)
    sequence.extend([300, 400, 500, 600])
    return list(sequence.generate(sampling, n_max=n))


def test_sampling_parameters_reach_the_choice(models) -> None:
    with LlamaModel(models("M")) as model:
        greedy = write(model, Sampling())
        assert write(model, Sampling()) == greedy
        assert write(model, Sampling(temperature=1.0, top_k=1, seed=5)) == greedy
        assert write(model, Sampling(temperature=5.0, seed=1)) != write(model, Sampling(temperature=5.0, seed=2))
        banned = tuple((token, float("-inf")) for token in set(greedy))
        assert not set(write(model, Sampling(logit_bias=banned))) & set(greedy)
        assert write(model, Sampling(logit_bias=((333, 1000.0),))) == [333] * 20
        for penalty in ({"frequency_penalty": 100.0}, {"presence_penalty": 100.0}, {"repeat_penalty": 1000.0}):
            ids = write(model, Sampling(penalty_last_n=100, **penalty))
            assert len(set(ids)) == len(ids)


def test_a_grammar_is_followed(models) -> None:
    with LlamaModel(models("M")) as model:
        ids = write(model, Sampling(grammar='root ::= "yes, [bold]" [0-9] [0-9]'), n=40)
        text = b"".join(model.token_bytes(token) for token in ids).decode()
        assert text[:11] == "yes, [bold]"
        assert text[11:].isdigit()
        assert model.is_end(ids[-1])


def test_seeds_of_positions_are_spread_and_stable() -> None:
    assert seed_at(1, 2) == 848689335
    assert len({seed_at(seed, position) for seed in range(20) for position in range(50)}) == 1000


def test_the_engine_log_goes_where_it_is_sent_and_nowhere_else(models, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with LlamaModel(models("M"), on_log=lines.append):
        assert any("llama_model_loader" in line for line in lines)
    with LlamaModel(models("M")):
        pass
    assert capfd.readouterr() == ("", "")
