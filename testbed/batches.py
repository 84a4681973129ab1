"""Training batches of text and retrieval rows, held on the training device."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Batches:
    """Draws rows of `length + 1` ids, text rows first.

    `stream`: token ids int32 [N] of the corpus; `prompts` int32 [R, length + 1] and
    `answers` bool of the same shape: packed retrieval rows. Both are gone through in a
    new random order each time, the text with a new offset of its windows.
    """

    stream: torch.Tensor
    prompts: torch.Tensor
    answers: torch.Tensor
    length: int
    text_rows: int
    prompt_rows: int
    rng: np.random.Generator
    _starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _order: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 [text_rows + prompt_rows, length + 1]; answers bool [prompt_rows, ...]."""
        while len(self._starts) < self.text_rows:
            self._starts = np.concatenate([self._starts, self._new_starts()])
        while len(self._order) < self.prompt_rows:
            order = self.rng.permutation(len(self.prompts))
            self._order = np.concatenate([self._order, order])
        starts, self._starts = np.split(self._starts, [self.text_rows])
        picked, self._order = np.split(self._order, [self.prompt_rows])
        return self._gather(self._move(starts), self._move(picked))

    def _new_starts(self) -> np.ndarray:
        offset = self.rng.integers(self.length)
        windows = (len(self.stream) - 1 - offset) // self.length
        if windows < 1:
            raise ValueError(f"the corpus has {len(self.stream)} tokens, too few for one window")
        return offset + self.length * self.rng.permutation(windows)

    def _move(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices).to(self.stream.device, non_blocking=True)

    def _gather(self, starts: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        within = torch.arange(self.length + 1, device=self.stream.device)
        text = self.stream[starts[:, None] + within]
        return torch.cat([text, self.prompts[picked]]), self.answers[picked]
