"""SmolLM2's tokenizer and chat template, built from the vocabulary and merges inside the GGUF file.

Invariant: decode(encode(text)) == text for every text; special tokens are recognised only by `encode_chat`, so that a
document that happens to contain "<|im_start|>" cannot change who is speaking.
"""

from __future__ import annotations

import pathlib

from .gguf_file import find_smollm2

_CONTROL = 3  # token type of GGUF: a special token
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    def __init__(self, path: pathlib.Path | str | None = None):
        import gguf
        from tokenizers import Regex, Tokenizer as Engine, decoders, models, pre_tokenizers

        fields = gguf.GGUFReader(pathlib.Path(path or find_smollm2())).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"].contents()]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._special = {token: index for token, (index, kind) in zip(tokens, enumerate(types)) if kind == _CONTROL}
        self._engine = Engine(models.BPE(vocabulary, merges))
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._engine.decoder = decoders.ByteLevel()
        self.end_of_turn = self._special["<|im_end|>"]
        self.start_of_turn = self._special["<|im_start|>"]
        self.end_of_text = self._special["<|endoftext|>"]

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._engine.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_turn(self, role: str, content: str) -> list[int]:
        """One finished turn: <|im_start|>role, a line break, content, <|im_end|>, a line break."""
        return [self.start_of_turn, *self.encode(f"{role}\n{content}"), self.end_of_turn, *self.encode("\n")]

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        """The model's chat template over (role, content) pairs, ending where the assistant's answer starts."""
        ids = [] if messages and messages[0][0] == "system" else self.encode_turn("system", SYSTEM)
        for role, content in messages:
            ids += self.encode_turn(role, content)
        return ids + self.assistant_start()

    def assistant_start(self) -> list[int]:
        return [self.start_of_turn, *self.encode("assistant\n")]
