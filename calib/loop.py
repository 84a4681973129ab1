"""The calibration loop: steps, validations, the best checkpoint, state on disk."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolaq.calib.checkpoint import Best, RunState, save_state
from rolaq.calib.schedule import learning_rate, validates_after
from rolaq.calib.trainer import METRICS, Trainer
from rolaq.calib.validate import Score, Validation, score
from rolaq.common.errors import RolaqError
from rolaq.common.progress import Progress
from rolaq.common.tracking import Tracker

FLUSH_EVERY = 10  # steps between two looks at the losses, which wait for the device


class CalibrationLoop:
    """Runs a trainer from `state` to the last step; whatever happens, the file at `path` stays usable."""

    def __init__(
        self,
        trainer: Trainer,
        validation: Validation,
        batches: Sequence[Tensor],
        state: RunState,
        path: Path,
        tracker: Tracker,
        started: float | None = None,
    ) -> None:
        """batches: token ids per step on the model's device. A state with a student in it is resumed.

        started: `time.perf_counter()` of the run's start, earlier runs' minutes already subtracted.
        """
        self.trainer, self.validation, self.batches = trainer, validation, batches
        self.student, self.config = trainer.student, trainer.config
        self.state, self.path, self.tracker = state, path, tracker
        self.pending: list[tuple[int, Tensor]] = []
        self.run_started = time.perf_counter() if started is None else started
        self.started = time.perf_counter()  # of the steps in `pending`
        if state.student:
            self.student.load_state_dict(state.student)
            trainer.optimizer.load_state_dict(state.optimizer)

    def run(self) -> Best:
        """Optimise to the end; returns the checkpoint with the lowest S.

        Raises `RolaqError` when a loss is NaN or infinite; the last good state stays on disk.
        """
        steps, every = self.config.steps, self.config.validation.every
        first = self.state.step
        with Progress(total=steps - first, label="calibrate") as bar:
            for step in range(first, steps + 1):
                if validates_after(step, steps, every) and not (self.state.best and step == first):
                    self._validate(step, bar)
                if step == steps:
                    break
                self.pending.append((step, self.trainer.step(self.batches[step], step)))
                if len(self.pending) >= FLUSH_EVERY:
                    self._flush(bar)
                bar.update()
        assert self.state.best is not None  # the start is always validated
        return self.state.best

    def _flush(self, bar: Progress | None = None) -> None:
        """Fetch the pending losses, refuse NaN, record and track them."""
        if not self.pending:
            self.started = time.perf_counter()
            return
        values = torch.stack([metrics.float() for _, metrics in self.pending]).tolist()
        self.state.seconds += time.perf_counter() - self.started
        for (step, _), row in zip(self.pending, values, strict=True):
            self._refuse_nan(step, row[0] + row[-1])
            entry = {"kind": "step", "step": step, **dict(zip(METRICS, row, strict=True))}
            peak, warmup = self.config.lr_rotation, self.config.warmup
            entry["lr_rotation"] = learning_rate(step, self.config.steps, peak, warmup)
            entry["length"] = self.batches[step].shape[1]
            self._record(entry, "train")
        if bar is not None:
            bar.postfix(loss=values[-1][0], S=self.state.best.score if self.state.best else math.nan)
        self.pending = []
        self.started = time.perf_counter()

    def _validate(self, step: int, bar: Progress) -> None:
        """Score the parameters after `step` steps, keep them if best, and write the state."""
        self._flush(bar)
        with torch.no_grad():
            kl = self.validation.kl(self.student.method())
        result = score(kl, self.state.reference, self.config.validation.weights)
        self._refuse_nan(step, result.total)
        self._record({"kind": "validation", "step": step, **describe(result)}, "val")
        if self.state.best is None or result.total < self.state.best.score:
            self.state.best = Best(step, result.total, _cpu(self.student.state_dict()))
        self.state.step = step
        self.state.student = _cpu(self.student.state_dict())
        self.state.optimizer = copy.deepcopy(self.trainer.optimizer.state_dict())
        self.state.minutes = (time.perf_counter() - self.run_started) / 60
        save_state(self.path, self.state)
        bar.postfix(S=result.total, best=self.state.best.score)
        self.started = time.perf_counter()

    def _record(self, entry: dict[str, Any], prefix: str) -> None:
        self.state.history.append(entry)
        numbers = {f"{prefix}/{k}": v for k, v in entry.items() if k not in ("kind", "step")}
        self.tracker.log(numbers, step=entry["step"])

    def _refuse_nan(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            kept = f"the state after step {self.state.step} is kept in {self.path}"
            raise RolaqError(
                f"loss is {value} at step {step}: {kept if self.state.best else 'nothing was written'}; "
                "lower calib.lr_rotation and calib.lr_threshold, then start with overwrite=true"
            )


def describe(result: Score) -> dict[str, float]:
    """S and its parts as flat numbers: `S`, `r_<length>`, `kl_<length>`."""
    ratios = {f"r_{length}": ratio for length, ratio in result.ratios.items()}
    return {"S": result.total, **ratios, **{f"kl_{length}": kl for length, kl in result.kl.items()}}


def _cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
