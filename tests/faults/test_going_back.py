"""Going back over the end of a reply, whatever the template writes there."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamakv.ops.requests import SamplingOptions
from tests.ops.driver import Driver, Heard, state_of

_HEAD = "{% for message in messages %}"
_TAIL = "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
_ROLE = "{{ message['role'] + ':' + message['content'] + "
TEMPLATES = {
    "end token": _HEAD + _ROLE + "'<|im_end|>\\n' }}" + _TAIL,
    "space before the end token": _HEAD + _ROLE + "' <|im_end|>\\n' }}" + _TAIL,
    "another end token": _HEAD + _ROLE + "eos_token + '\\n' }}" + _TAIL,
    "no end token": _HEAD + _ROLE + "'\\n\\n' }}" + _TAIL,
}


@pytest.mark.parametrize("between", TEMPLATES)
def test_what_was_taken_back_leaves_nothing_behind(variant, tmp_path: Path, between: str) -> None:
    # B11, B58, B59
    driver = Driver(variant("ME", between, template=TEMPLATES[between]), tmp_path)
    sampling = SamplingOptions(temperature=0.9, max_tokens=200, seed=4)
    with driver.chat(sampling=sampling) as live, driver.chat(sampling=sampling) as cold:
        for conversation in (live, cold):
            assert conversation.send("One.", Heard().reporter).finish_reason == "stop"
        live.send("Two.", Heard().reporter)
        live.undo(Heard().reporter)
        for conversation in (live, cold):
            conversation.send("Three.", Heard().reporter)
        assert state_of(live)[0] == state_of(cold)[0]
        assert live.messages == cold.messages
